"""What the wrapper and the ranks tell each other: the job, its layout, and the messages of a run.

Dataclasses and their JSON only: this is the one module of the wrapper that the ranks import.
"""

from trimtab.protocol.job import (
    Balance,
    Batch,
    Data,
    Job,
    JobError,
    Model,
    Parallel,
    Requeue,
    Shape,
    Train,
    divisors,
)
from trimtab.protocol.layout import Layout, layout_of
from trimtab.protocol.messages import (
    Done,
    Failed,
    Hello,
    Message,
    Notice,
    Order,
    Probe,
    Reshaped,
    Saved,
    Stack,
    StepReport,
    decode,
    encode,
    setting_from,
)
from trimtab.protocol.setting import Setting, setting_of
from trimtab.protocol.shares import even_shares
from trimtab.protocol.tables import job_from_dict, job_from_json, job_to_json

__all__ = [
    "Balance",
    "Batch",
    "Data",
    "Done",
    "Failed",
    "Hello",
    "Job",
    "JobError",
    "Layout",
    "Message",
    "Model",
    "Notice",
    "Order",
    "Parallel",
    "Probe",
    "Requeue",
    "Reshaped",
    "Saved",
    "Setting",
    "Shape",
    "Stack",
    "StepReport",
    "Train",
    "decode",
    "divisors",
    "encode",
    "even_shares",
    "job_from_dict",
    "job_from_json",
    "job_to_json",
    "layout_of",
    "setting_from",
    "setting_of",
]
