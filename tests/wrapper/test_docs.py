import dataclasses
import re
import typing
from pathlib import Path

import pytest

from trimtab import submit
from trimtab.protocol import Job, job_from_dict

ROOT = Path(__file__).parents[2]
SECTIONS = typing.get_type_hints(Job)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_job_files_page_lists_every_key_of_a_section_and_no_other(section):
    page = (ROOT / "docs/job-file.md").read_text()
    table = page.split(f"## [{section}]\n")[1].split("\n## ")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {key for cell in first_cells for key in re.findall(r"`(\w+)`", cell)}
    assert documented == {field.name for field in dataclasses.fields(SECTIONS[section])}


def test_links_between_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readmes_batch_script_asks_slurm_for_what_ours_does():
    (script,) = re.findall(r"```\n(#!/bin/bash\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    job = job_from_dict({"parallel": {"tensor": 8, "pipeline": 8}})
    ours = submit.render("multi-node", Path("job.toml"), job, submit.Request(8, 8, 1, "24:00:00"))
    asked = [option for line in script.splitlines() if line.startswith("#SBATCH") for option in line.split()[1:]]
    assert set(asked) <= {line.removeprefix("#SBATCH ") for line in ours.splitlines()}
    assert {option.split("=")[0] for option in asked} >= {"--exclusive", "--requeue", "--open-mode", "--signal"}
    assert script.splitlines()[-1] == "exec trimtab run job.toml"
    assert re.search(r"^exec .* run .*job.toml$", ours.splitlines()[-1])
