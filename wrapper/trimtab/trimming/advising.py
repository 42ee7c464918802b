"""From what a run has shown to advice, by what `trimtab plan` would say at this moment. Pure: for a thread."""

from trimtab.trimming.surroundings import Advice, Question


def advise(question: Question) -> Advice:
    """Diagnose, plan and decide on the steps since the setting last changed.

    Raises PlanError or DiagnosisError where they do not tell enough.
    """
    raise NotImplementedError
