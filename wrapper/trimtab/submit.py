"""`trimtab submit`: a job file and a template become an sbatch script. Pure, but for finding the template."""

import os
import re
import shlex
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import jinja2

from trimtab.protocol import Job, JobError

_SUFFIX = ".sbatch.j2"


@dataclass(frozen=True)
class Request:
    """What is asked of Slurm."""

    nodes: int
    gpus_per_node: int
    cpus_per_gpu: int
    time_limit: str
    output: str = "trimtab-%j.out"
    sbatch_arguments: tuple[str, ...] = ()
    """Further arguments of sbatch, one a line of the script."""


def template_directory() -> Path:
    """Where the templates are: beside the sources in a clone, below the prefix when installed."""
    in_clone = Path(__file__).parents[2] / "sbatch_templates"
    return in_clone if in_clone.is_dir() else Path(sysconfig.get_path("data"), "share/trimtab/sbatch_templates")


def template_names() -> list[str]:
    """Names of the templates that come with trimtab."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in template_directory().glob(f"*{_SUFFIX}"))


def render(template: str, job_file: Path, job: Job, request: Request) -> str:
    """The sbatch script: `template` is a name of `template_names()`, or the path of a template of the user's own.

    Raises JobError for an unknown template, a faulty one, or a request that the job does not fit.
    """
    job.shape(request.nodes * request.gpus_per_node)
    for argument in request.sbatch_arguments:
        if not re.fullmatch(r"-[^\n]*", argument):
            raise JobError("sbatch argument", argument, 'must begin with "-" and fit on one line: write --name=value')
    try:
        return _find(template).render(
            name=re.sub(r"[^\w.-]", "_", job_file.stem),
            nodes=request.nodes,
            gpus_per_node=request.gpus_per_node,
            cpus_per_gpu=request.cpus_per_gpu,
            time_limit=request.time_limit,
            output=request.output,
            requeue=job.requeue.enabled,
            grace_seconds=job.requeue.grace_seconds,
            sbatch_arguments=request.sbatch_arguments,
            command=shlex.join([sys.executable, "-m", "trimtab"]),
            job_file=shlex.quote(os.fspath(job_file.absolute())),
        )
    except jinja2.TemplateError as error:
        raise JobError("template", template, f"cannot be rendered: {error}") from error


def _find(template: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template_directory(), Path.cwd()]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is a shell script, not HTML
    )
    if template in template_names():
        return environment.get_template(template + _SUFFIX)
    path = Path(template)
    if not path.is_file():
        raise JobError("template", template, "is neither a template nor a file", template_names())
    return environment.from_string(path.read_text(encoding="utf-8"))
