"""The small parts of a rank: who it is, what it is told to import, its clock, its vocabulary."""

import sys
import time

import pytest
import torch

from trimtab.protocol import JobError, job_from_dict
from trimtab_megatron.__main__ import _in_one_line, _is_bad_input, _is_lost_peer
from trimtab_megatron.identity import Identity, InputError, RankError, identity, introduction
from trimtab_megatron.model import padded_vocabulary, precision
from trimtab_megatron.provider import load_provider
from trimtab_megatron.stage_clock import StageClock

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "2", "SLURMD_NODENAME": "n2"}


def test_a_rank_knows_itself_by_torchruns_names_or_else_slurms():
    assert identity(SLURM) == Identity(5, 6, 2, "n2")
    assert identity(SLURM | TORCHRUN) == Identity(3, 8, 1, "n2")


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}, SLURM | {"SLURM_NTASKS": "many"}])
def test_a_rank_without_a_place_is_refused(environment):
    with pytest.raises(RankError):
        identity(environment)


def test_a_rank_that_holds_nothing_yet_says_where_it_will_be():
    job = job_from_dict({"parallel": {"tensor": 2, "pipeline": 3}, "model": {"layers": 6}})
    hello = introduction(Identity(9, 12, 1, "n2"), job)
    assert (hello.rank, hello.node, hello.local_rank) == (9, "n2", 1)
    assert (hello.tensor_rank, hello.data_rank, hello.pipeline_rank) == (1, 0, 2)
    assert (hello.layers, hello.parameters) == ((), 0)
    with pytest.raises(JobError, match="needs a multiple of 6 ranks"):
        introduction(Identity(9, 10, 1, "n2"), job)


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text("def build():\n    return 7\n\nvalue = 3\n")
    (tmp_path / "broken_module.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("own_module", "broken_module"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("module")
def test_a_provider_is_found_by_its_name():
    assert load_provider("model.provider", "own_module:build")() == 7


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:build", "there is no module nowhere"),
        ("nowhere.inside:build", "there is no module nowhere.inside"),
        ("own_module:biuld", 'has no function biuld; choose from: "build"'),
        ("own_module:value", "has no function value"),
    ],
)
def test_a_provider_that_is_not_there_is_named(name, message):
    with pytest.raises(JobError, match=message):
        load_provider("model.provider", name)


@pytest.mark.usefixtures("module")
def test_an_error_inside_a_providers_module_is_shown_as_it_is():
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_provider("model.provider", "broken_module:build")


def test_the_clock_counts_compute_and_neither_waiting_nor_other_names():
    clock = StageClock(cuda=False)
    for name in ("forward-compute", "forward-recv", "backward-compute"):
        clock(name, log_level=2).start()
        began = time.process_time()
        while time.process_time() - began < 0.05:
            pass
        time.sleep(0.2)
        clock(name).stop()
    times = clock.read()
    assert times.forward_seconds == pytest.approx(0.05, abs=0.02)
    assert times.backward_seconds == pytest.approx(0.05, abs=0.02)


def test_the_clock_sums_microbatches_and_begins_anew_once_read():
    clock = StageClock(cuda=False)
    for _ in range(3):
        clock("forward-compute").start()
        began = time.process_time()
        while time.process_time() - began < 0.02:
            pass
        clock("forward-compute").stop()
    assert clock.read().forward_seconds == pytest.approx(0.06, abs=0.02)
    assert clock.read().forward_seconds == 0.0


@pytest.mark.parametrize(
    ("size", "tensor", "padded"), [(257, 1, 384), (257, 8, 384), (8192, 2, 8192), (100, 1, 128), (257, 3, 384)]
)
def test_the_vocabulary_is_padded_alike_at_every_tensor_parallel_size(size, tensor, padded):
    assert padded_vocabulary(size, tensor) == padded


@pytest.mark.parametrize(
    ("name", "on_cpu", "on_gpu"),
    [
        ("auto", torch.float32, torch.bfloat16),
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("fp16", torch.float16, torch.float16),
    ],
)
def test_precisions(name, on_cpu, on_gpu):
    job = job_from_dict({"train": {"precision": name}})
    assert (precision(job, cuda=False), precision(job, cuda=True)) == (on_cpu, on_gpu)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/x/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"), True),
        (RuntimeError("Read error [10.0.0.1]:5: Connection reset by peer"), True),
        (RuntimeError("CUDA out of memory"), False),
        (RankError("the gradient norm of step 3 is nan"), False),
    ],
)
def test_a_lost_peer_is_told_from_an_own_error(error, lost):
    assert _is_lost_peer(error) is lost


@pytest.mark.parametrize(
    ("error", "cause", "bad"),
    [
        (JobError("data.path", "x", "holds no UTF-8 text"), None, True),
        (JobError("data.path", "x", "cannot be read"), PermissionError(13, "Permission denied"), True),
        (JobError("data.path", "x", "cannot be read"), OSError(5, "Input/output error"), False),
        (InputError("the checkpoint is of another model"), None, True),
        (RankError("no checkpoint is sound"), None, False),
        (ValueError("the user's own"), None, False),
    ],
)
def test_bad_input_is_told_from_what_may_pass(error, cause, bad):
    error.__cause__ = cause
    assert _is_bad_input(error) is bad


def test_errors_are_one_line():
    assert _in_one_line(RuntimeError("first\n  second")) == "RuntimeError: first second"
    assert _in_one_line(RankError("what to do")) == "what to do"
