"""From what a run has shown to advice, by what `trimtab plan` would say at this moment. Pure: for a thread."""

from dataclasses import replace

from trimtab.account import OrderRecord
from trimtab.balance.deciding.decide import Considered
from trimtab.balance.deciding.situation import Kind
from trimtab.balance.model.accelerators import ACCELERATORS
from trimtab.balance.plan import Plan
from trimtab.diagnosis.answer import diagnosis_of
from trimtab.planning.answer import Answer, changed_job, decided
from trimtab.planning.devices import Equipment, accelerator_named, likely_accelerator
from trimtab.planning.observed import Observed, observed
from trimtab.planning.situation import Case, from_run
from trimtab.protocol import Order, Setting
from trimtab.trimming.surroundings import Advice, Question, Restart
from trimtab_slurm.contents import Profile

IN_PLACE = frozenset({Kind.LAYERS, Kind.MICROBATCHES, Kind.RECOMPUTE})
"""What the ranks do between two steps."""


def advise(question: Question) -> Advice:
    """Diagnose, plan and decide, on the steps since the setting last changed.

    Raises PlanError or DiagnosisError where they do not tell enough.
    """
    case = _case(question)
    unsettled_seconds = max(0.0, _last_seconds(question) - question.settled_seconds)
    lost_for_seconds = min(case.situation.lasting_seconds, unsettled_seconds)
    decision, ledger = decided(case, question.ledger, lost_for_seconds)
    answer = Answer(case, decision)
    advice = Advice(answer, answer.told, question.surroundings.now_seconds, ledger)
    order = decision.order
    if order is None or order.plan is None:
        return advice
    advice = replace(advice, record=_record(question, answer, order, order.plan))
    if decision.dry_run or order.kind is Kind.REPACK:
        return advice
    if order.kind in IN_PLACE:
        setting = _setting(order.plan)
        return replace(advice, order=Order("reshape", decision.reason, setting, replaces=question.setting.fingerprint))
    return replace(advice, restart=_restart(case, order, decision.reason))


def _case(question: Question) -> Case:
    """As of a profile that has just been written, with what only the running job knows."""
    surroundings, training = question.surroundings, question.training
    profile = Profile("", 0, "", training.start_seconds, training.end_seconds, 0, (), (), training)
    run = observed(question.title, profile)
    case = from_run(run, diagnosis_of(question.title, profile), _equipment(question, run), question.detection)
    left = [seconds for seconds in (case.situation.seconds_left, surroundings.seconds_left) if seconds is not None]
    toll = question.toll
    if surroundings.restart_seconds is not None:
        toll = replace(toll, restart_seconds=surroundings.restart_seconds)
    situation = replace(
        case.situation,
        asked=False,
        live=True,
        seconds_left=min(left),
        spare_nodes=surroundings.spare_nodes,
        exclusions_left=surroundings.exclusions_left,
        allocation=surroundings.allocation,
        fixed_nodes=surroundings.fixed_nodes,
        no_requeue=surroundings.no_requeue,
        no_restart=surroundings.no_restart,
        toll=toll,
        now_seconds=surroundings.now_seconds,
    )
    if question.relieved_seconds is not None:
        lasting_seconds = _last_seconds(question) - question.relieved_seconds
        situation = replace(situation, relieved=True, lasting_seconds=lasting_seconds)
    return replace(case, situation=situation)


def _last_seconds(question: Question) -> float:
    """When the last step ended."""
    return float(question.training.steps["time_seconds"][-1])


def _equipment(question: Question, run: Observed) -> Equipment:
    """Samplers tell of the devices when the job has ended: until then it is what the wrapper sees of its own node."""
    surroundings, likely = question.surroundings, likely_accelerator(run.training)
    on_cpus = likely is ACCELERATORS["cpu"]
    accelerator = likely if on_cpus else accelerator_named("gpu", surroundings.gpu_model)
    return Equipment(
        accelerator=accelerator,
        likely=accelerator or likely,
        memory_bytes=(surroundings.gpu_memory_bytes,) * run.shape.pipeline,
        cores=surroundings.cores if on_cpus else None,
        utilization_ratio=None,
    )


def _record(question: Question, answer: Answer, order: Considered, plan: Plan) -> OrderRecord:
    outcome = (
        "told only (dry run)" if answer.decision.dry_run else "asked for" if order.kind is Kind.REPACK else "given"
    )
    return OrderRecord(
        number=0,
        step=int(question.training.steps["step"][-1]) + 1,
        time_seconds=question.surroundings.now_seconds,
        kind=str(order.kind),
        before=str(question.setting),
        after=str(_setting(plan)) if order.kind in IN_PLACE else order.change,
        reason=answer.decision.reason,
        before_seconds=answer.case.situation.step_seconds,
        predicted_seconds=order.predicted_step_seconds,
        outcome=outcome,
    )


def _setting(plan: Plan) -> Setting:
    return Setting(plan.layout, plan.microbatches, plan.recomputed_layers)


def _restart(case: Case, order: Considered, reason: str) -> Restart:
    job = changed_job(case.job, order)
    return Restart(job.parallel, job.batch, order.nodes or case.nodes, order.exclude, reason)
