/* A libnvidia-ml.so.1 that does what a script says, for the tests: only the functions that trimtab calls.
 *
 * The script is the file `script` beside the library; it is read anew whenever it is replaced. One rule a line, fields
 * separated by blanks, `#` begins a comment, `*` is any GPU; of two rules for the same thing the later counts:
 *
 *     driver 570.86.15
 *     gpu 0 GPU-aaaa 3 00000000:1B:00.0 NVIDIA_H100   index, uuid, minor, PCI bus id, name (_ for a blank)
 *     mig 0 1 MIG-bbbb 7 0                            GPU, MIG index, uuid, GPU instance, compute instance
 *     set 0 PowerUsage 250000                         what a function gives; without a rule, 0
 *     set 0/1 MemoryUsed 1000                         the same of a MIG instance
 *     fail * TotalEnergyConsumption 3                 the nvmlReturn_t that a function gives
 *     fail 2 * 15                                     the GPU is lost: everything that is asked of it fails
 *     delay 1 UtilizationRates 3600                   seconds that a function takes
 *     xid 0 79                                        an event that is waiting; given once
 *     xid 0/1 43                                      the same of a MIG instance
 *     process 0 4711 123456                           GPU or MIG instance, process id, bytes
 *
 * Layouts are those of NVIDIA's public nvml.h; versioned structs begin with a version that is not looked at. Compiled
 * with OLD_DRIVER it lacks what came after the drivers of 2021, with SLOW_LOAD it takes a second to be loaded.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <libgen.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef SLOW_LOAD
__attribute__((constructor)) static void load(void) { sleep(1); }
#endif

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };
enum { MOST = 512, ANY = -1, WHOLE = -1 };

typedef struct { int gpu, mig, minor, gi, ci; char uuid[96], bus[32], name[96]; } Device;
typedef struct { char kind; int gpu, mig; char call[96]; double number; unsigned long long integer; } Rule;
typedef struct { int gpu, mig; unsigned long long code; int given; } Xid;
typedef struct { int gpu, mig; unsigned pid; unsigned long long bytes; } Process;
typedef struct { Device *devices[64]; int count; } EventSet;
typedef struct { Device *device; } GpmSample;

/* Never freed, so that whoever uses one while the script changes, or holds a device of it, goes on. */
typedef struct {
    char driver[80];
    Device devices[MOST]; int device_count;
    Rule rules[MOST]; int rule_count;
    Xid xids[MOST]; int xid_count;
    Process processes[MOST]; int process_count;
} Script;

static Script *_Atomic script;
static struct stat read_of;
static int initialized;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void place(const char *text, int *gpu, int *mig) {
    const char *slash = strchr(text, '/');
    *gpu = text[0] == '*' ? ANY : atoi(text);
    *mig = slash ? atoi(slash + 1) : WHOLE;
}

static void parse(Script *into, char *line) {
    char *comment = strchr(line, '#'), a[96], b[96], c[96], d[96];
    if (comment) *comment = 0;
    if (sscanf(line, "driver %79s", into->driver) == 1) return;
    Device *device = &into->devices[into->device_count];
    if (sscanf(line, "gpu %d %95s %d %31s %95s", &device->gpu, device->uuid, &device->minor, device->bus, device->name) == 5) {
        for (char *blank = device->name; (blank = strchr(blank, '_')); *blank = ' ');
        device->mig = WHOLE;
        into->device_count++;
    } else if (sscanf(line, "mig %d %d %95s %d %d", &device->gpu, &device->mig, device->uuid, &device->gi, &device->ci) == 5) {
        into->device_count++;
    } else if (sscanf(line, "xid %95s %95s", a, b) == 2) {
        Xid *xid = &into->xids[into->xid_count++];
        place(a, &xid->gpu, &xid->mig);
        xid->code = strtoull(b, 0, 10);
    } else if (sscanf(line, "process %95s %95s %95s", a, b, c) == 3) {
        Process *process = &into->processes[into->process_count++];
        place(a, &process->gpu, &process->mig);
        process->pid = (unsigned)atoi(b);
        process->bytes = strtoull(c, 0, 10);
    } else if (sscanf(line, "%95s %95s %95s %95s", a, b, c, d) == 4) {
        Rule *rule = &into->rules[into->rule_count++];
        rule->kind = a[0];
        place(b, &rule->gpu, &rule->mig);
        memcpy(rule->call, c, sizeof c);
        rule->number = atof(d);
        rule->integer = strtoull(d, 0, 0);
    }
}

static void read_script(void) {
    Dl_info info;
    char library[2048], path[4096], line[512];
    struct stat now;
    dladdr((void *)read_script, &info);
    snprintf(library, sizeof library, "%s", info.dli_fname);
    snprintf(path, sizeof path, "%s/script", dirname(library));
    pthread_mutex_lock(&lock);
    if (!script) script = calloc(1, sizeof *script);
    if (!stat(path, &now) && (now.st_ino != read_of.st_ino || memcmp(&now.st_mtim, &read_of.st_mtim, sizeof now.st_mtim))) {
        Script *fresh = calloc(1, sizeof *fresh);
        FILE *file = fopen(path, "r");
        while (file && fgets(line, sizeof line, file)) parse(fresh, line);
        if (file) fclose(file);
        for (int i = 0; i < fresh->xid_count && i < script->xid_count; i++) {
            Xid *xid = &fresh->xids[i], *before = &script->xids[i];
            xid->given = before->given && xid->gpu == before->gpu && xid->mig == before->mig && xid->code == before->code;
        }
        read_of = now;
        script = fresh;
    }
    pthread_mutex_unlock(&lock);
}

static Rule *rule_for(char kind, const Device *device, const char *call) {
    for (int i = script->rule_count - 1; i >= 0; i--) {
        Rule *rule = &script->rules[i];
        int fits = rule->gpu == ANY || (device && rule->gpu == device->gpu && (rule->mig == WHOLE || rule->mig == device->mig));
        if (kind == 's' && rule->gpu != ANY && device && rule->mig != device->mig) fits = 0; /* a GPU's figure is not its instances' */
        if (rule->kind == kind && fits && (!strcmp(rule->call, call) || (rule->call[0] == '*' && device))) return rule;
    }
    return 0;
}

/* What every function does first: the script, its delay, its fault. */
static int enter(const Device *device, const char *call) {
    read_script();
    Rule *delay = rule_for('d', device, call), *fault = rule_for('f', device, call);
    if (delay) {
        struct timespec pause = {(time_t)delay->number, (long)((delay->number - (time_t)delay->number) * 1e9)};
        while (nanosleep(&pause, &pause));
    }
    if (fault) return (int)fault->integer;
    return initialized || !strcmp(call, "Init") ? SUCCESS : UNINITIALIZED;
}

static unsigned long long integer(const Device *device, const char *call) {
    Rule *rule = rule_for('s', device, call);
    return rule ? rule->integer : 0;
}

static Device *find(int gpu, int mig) {
    for (int i = 0; i < script->device_count; i++) {
        Device *device = &script->devices[i];
        if (device->gpu == gpu && device->mig == mig) return device;
    }
    return 0;
}

#define ENTER(device, call) do { int code = enter(device, call); if (code) return code; } while (0)
#define NUMBER(function, type, call) \
    int function(Device *device, type *value) { ENTER(device, call); *value = (type)integer(device, call); return SUCCESS; }

int nvmlInitWithFlags(unsigned flags) { (void)flags; ENTER(0, "Init"); initialized = 1; return SUCCESS; }
const char *nvmlErrorString(int code) { static char text[32]; snprintf(text, sizeof text, "error %d", code); return text; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    ENTER(0, "DriverVersion");
    snprintf(text, size, "%s", script->driver);
    return SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER(0, "Count");
    *count = 0;
    for (int i = 0; i < script->device_count; i++) *count += script->devices[i].mig == WHOLE;
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **handle) {
    read_script();
    *handle = find((int)index, WHOLE);
    ENTER(*handle, "HandleByIndex");
    return *handle ? SUCCESS : INVALID;
}
int nvmlDeviceGetUUID(Device *device, char *text, unsigned size) {
    ENTER(device, "UUID");
    snprintf(text, size, "%s", device->uuid);
    return SUCCESS;
}
int nvmlDeviceGetName(Device *device, char *text, unsigned size) {
    ENTER(device, "Name");
    snprintf(text, size, "%s%s", find(device->gpu, WHOLE)->name, device->mig == WHOLE ? "" : " MIG");
    return SUCCESS;
}
int nvmlDeviceGetMinorNumber(Device *device, unsigned *minor) { ENTER(device, "MinorNumber"); *minor = (unsigned)device->minor; return SUCCESS; }

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; } PciInfo;
int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *info) {
    ENTER(device, "PciInfo");
    memset(info, 0, sizeof *info);
    snprintf(info->text, sizeof info->text, "%s", device->bus);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    ENTER(device, "MigMode");
    *current = *pending = 0;
    for (int i = 0; i < script->device_count; i++)
        if (script->devices[i].gpu == device->gpu && script->devices[i].mig != WHOLE) *current = *pending = 1;
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) { ENTER(device, "MaxMigDeviceCount"); *count = 7; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **handle) {
    ENTER(device, "MigDeviceHandleByIndex");
    *handle = find(device->gpu, (int)index);
    return *handle ? SUCCESS : NOT_FOUND;
}
int nvmlDeviceGetGpuInstanceId(Device *device, unsigned *id) { ENTER(device, "GpuInstanceId"); *id = (unsigned)device->gi; return SUCCESS; }
int nvmlDeviceGetComputeInstanceId(Device *device, unsigned *id) { ENTER(device, "ComputeInstanceId"); *id = (unsigned)device->ci; return SUCCESS; }

typedef struct { unsigned gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates) {
    ENTER(device, "UtilizationRates");
    rates->gpu = (unsigned)integer(device, "UtilizationGpu");
    rates->memory = (unsigned)integer(device, "UtilizationMemory");
    return SUCCESS;
}
NUMBER(nvmlDeviceGetPowerUsage, unsigned, "PowerUsage")
NUMBER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, "TotalEnergyConsumption")
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "ClocksEventReasons")

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *value) {
    (void)sensor;
    ENTER(device, "Temperature");
    *value = (unsigned)integer(device, "Temperature");
    return SUCCESS;
}
int nvmlDeviceGetClockInfo(Device *device, int type, unsigned *value) {
    const char *call = type == 1 ? "ClockSM" : type == 2 ? "ClockMemory" : "Clock";
    ENTER(device, call);
    *value = (unsigned)integer(device, call);
    return SUCCESS;
}
int nvmlDeviceGetPcieThroughput(Device *device, int counter, unsigned *value) {
    const char *call = counter == 0 ? "PcieSent" : "PcieReceived";
    ENTER(device, call);
    *value = (unsigned)integer(device, call);
    return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(Device *device, int type, int counter, unsigned long long *value) {
    (void)counter;
    const char *call = type == 0 ? "EccCorrected" : "EccUncorrected";
    ENTER(device, call);
    *value = integer(device, call);
    return SUCCESS;
}

typedef struct { unsigned field, scope; long long timestamp, latency; unsigned type; int code; unsigned long long value; } Field;
int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields) {
    ENTER(device, "FieldValues");
    for (int i = 0; i < count; i++) {
        char call[32];
        snprintf(call, sizeof call, "Field%u", fields[i].field);
        fields[i].code = enter(device, call);
        fields[i].type = 3; /* unsigned long long */
        fields[i].value = integer(device, call);
    }
    return SUCCESS;
}

typedef struct { Device *device; unsigned long long type, data; unsigned gi, ci; } EventData;
int nvmlEventSetCreate(EventSet **set) { ENTER(0, "EventSetCreate"); *set = calloc(1, sizeof **set); return SUCCESS; }
int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set) {
    (void)types;
    ENTER(device, "RegisterEvents");
    set->devices[set->count++] = device;
    return SUCCESS;
}
int nvmlEventSetWait_v2(EventSet *set, EventData *data, unsigned milliseconds) {
    (void)milliseconds;
    ENTER(0, "EventSetWait");
    for (int i = 0; i < script->xid_count; i++)
        for (int j = 0; j < set->count; j++) {
            Xid *xid = &script->xids[i];
            if (xid->given || set->devices[j]->gpu != xid->gpu) continue;
            Device *mig = xid->mig == WHOLE ? 0 : find(xid->gpu, xid->mig);
            xid->given = 1;
            *data = (EventData){set->devices[j], 8, xid->code, mig ? (unsigned)mig->gi : ~0u, mig ? (unsigned)mig->ci : ~0u};
            return SUCCESS;
        }
    return TIMEOUT;
}

#ifndef OLD_DRIVER
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "ClocksEventReasons")

typedef struct { unsigned version, sensor; int value; } Temperature;
int nvmlDeviceGetTemperatureV(Device *device, Temperature *temperature) {
    ENTER(device, "Temperature");
    temperature->value = (int)integer(device, "Temperature");
    return SUCCESS;
}

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
int nvmlDeviceGetMemoryInfo_v2(Device *device, Memory *memory) {
    ENTER(device, "MemoryInfo");
    memory->total = integer(device, "MemoryTotal");
    memory->reserved = 0;
    memory->used = integer(device, "MemoryUsed");
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

typedef struct { unsigned pid; unsigned long long bytes; unsigned gi, ci; } ProcessInfo;
int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, ProcessInfo *infos) {
    ENTER(device, "ComputeRunningProcesses");
    unsigned found = 0, room = infos ? *count : 0;
    for (int i = 0; i < script->process_count; i++) {
        Process *process = &script->processes[i];
        if (process->gpu != device->gpu || process->mig != device->mig) continue;
        if (found < room) infos[found] = (ProcessInfo){process->pid, process->bytes, ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

typedef struct { unsigned version, supported; } GpmSupport;
typedef struct { unsigned metric; int code; double value; const char *text[3]; } GpmMetric;
typedef struct { unsigned version, count; GpmSample *first, *second; GpmMetric metrics[]; } GpmMetrics;
int nvmlGpmQueryDeviceSupport(Device *device, GpmSupport *support) {
    ENTER(device, "GpmSupport");
    support->supported = (unsigned)integer(device, "GpmSupport");
    return SUCCESS;
}
int nvmlGpmSampleAlloc(GpmSample **sample) { ENTER(0, "GpmSampleAlloc"); *sample = calloc(1, sizeof **sample); return SUCCESS; }
int nvmlGpmSampleGet(Device *device, GpmSample *sample) { ENTER(device, "GpmSampleGet"); sample->device = device; return SUCCESS; }
int nvmlGpmMigSampleGet(Device *device, unsigned instance, GpmSample *sample) {
    ENTER(device, "GpmSampleGet");
    for (int i = 0; i < script->device_count; i++) {
        Device *mig = &script->devices[i];
        if (mig->gpu == device->gpu && mig->mig != WHOLE && mig->gi == (int)instance) {
            sample->device = mig;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}
int nvmlGpmMetricsGet(GpmMetrics *metrics) {
    Device *device = metrics->second->device;
    ENTER(device, "GpmMetricsGet");
    if (metrics->first == metrics->second || metrics->first->device != device) return INVALID;
    for (unsigned i = 0; i < metrics->count; i++) {
        char call[32];
        snprintf(call, sizeof call, "Gpm%u", metrics->metrics[i].metric);
        Rule *rule = rule_for('s', device, call);
        metrics->metrics[i].code = enter(device, call);
        metrics->metrics[i].value = rule ? rule->number : 0;
    }
    return SUCCESS;
}
#endif
