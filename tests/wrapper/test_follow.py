"""Seeing a submitted job through."""

from types import SimpleNamespace

from trimtab import follow as following
from trimtab.requeue import act
from trimtab_slurm.cluster import SlurmSilent


def test_a_controller_that_is_away_for_a_while_ends_nothing(monkeypatch, tmp_path):
    output = tmp_path / "out"
    output.write_text("step 1\n")
    ended = SimpleNamespace(state="COMPLETED", reason="None", stdout=str(output), ended=True)
    answers = iter([SlurmSilent("connection reset"), SlurmSilent("no contact"), ended])

    class Client:
        def job(self, job_id):
            answer = next(answers)
            if isinstance(answer, SlurmSilent):
                raise answer
            return answer

    monkeypatch.setattr(act, "FIRST_PAUSE_SECONDS", 0.001)
    shown = []
    assert following.follow(Client(), 7, shown.append) is ended
    assert shown == ["step 1\n"]
