"""Which devices an attempt holds."""

import pytest

from trimtab_slurm.resolve import held


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, ()),
        ({"SLURM_JOB_GPUS": ""}, None),
        ({"SLURM_JOB_GPUS": "0,1,1"}, ("0", "1")),
        ({"SLURM_JOB_GPUS": "0-2,5"}, ("0", "1", "2", "5")),
        ({"SLURM_JOB_GPUS": "128"}, ("128",)),
        ({"SLURM_JOB_GPUS": "", "CUDA_VISIBLE_DEVICES": "GPU-5c1a-8,MIG-77-0"}, ("GPU-5c1a-8", "MIG-77-0")),
        ({"ROCR_VISIBLE_DEVICES": "3"}, ("3",)),
    ],
)
def test_held_gpus_are_spelled_as_slurm_does(environment, gpus):
    assert held(environment) == gpus
