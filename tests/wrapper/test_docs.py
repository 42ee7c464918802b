import dataclasses
import re
import typing
from pathlib import Path

import pytest

from trimtab.protocol import Job

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
