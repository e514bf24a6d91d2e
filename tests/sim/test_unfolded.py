"""Folded against unfolded: one lane for many replicas and one class for many transfers, against every rank by itself.

`des-exact` folds, `des-per-rank` does not; both play every event. The jobs here are small and send for as long as they
compute, so that a fold which hides something shows it.
"""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from exatwin.scenarios.scenario import load_scenario
from exatwin.sim.calibration import default_calibration
from exatwin.sim.predict import predict
from exatwin.sim.traffic import build_traffic
from exatwin.topology.errors import InputError
from exatwin.topology.machine import load_machine

EXACT = 1e-9
# Where transfers of one class meet unlike crowds, the class keeps the pace of its slowest. Over 5,000 of the jobs
# below, a third of them such, the fold took 6.6 % too long at worst and 0.15 % too short. One found later is 1.6 % too
# short, and stands below by itself: the bound is what folds should keep to, so chance may find another.
UNEVEN = (-0.005, 0.10)
# With time shared max-min, one replica held up can leave the links to the others just when they need them, and a failed
# link can turn messages to one that is less used: over 1,500 jobs nothing gained more than 1.2 % by it.
GAIN = 0.03

MACHINES = ("frontier", "selene", "fugaku")
ORDERS = ("tp-dp-pp", "tp-pp-dp", "dp-tp-pp", "pp-dp-tp")


@cache
def figures_of(machine):
    """The machine's calibration without host work, which no fold touches."""
    calibration = default_calibration(load_machine(machine))
    step = calibration.step
    none = {name: getattr(step, name).model_copy(update={"value": 0.0}) for name in ("overhead", "hop_overhead")}
    return calibration.model_copy(update={"step": step.model_copy(update=none)})


def job(
    machine="frontier",
    tp=8,
    pp=4,
    dp=6,
    micro_batches=2,
    framework="megatron",
    placement=None,
    perturb=None,
    all_reduce=None,
):
    """A narrow layer a stage and long sequences: messages weigh as much as the work."""
    options = [
        f"machine={machine}",
        f"devices={tp * pp * dp}",
        f"framework={framework}",
        f"training.global_batch={micro_batches * dp}",
        "training.seq_len=8192",
        f"model={{layers: {pp}, hidden: 384, heads: 24, vocab: 1000}}",
        f"layout={{tp: {tp}, pp: {pp}, dp: {dp}}}",
        f"placement={json.dumps(placement or {})}",
        f"perturb={json.dumps(perturb or {})}",
        *([f"collectives.dp.all_reduce={all_reduce}"] if all_reduce else []),
    ]
    options += ["training.precision=fp32"] if machine == "fugaku" else []
    return load_scenario("h100-llama-3-8b", options)


def play(scenario, fidelity):
    return predict(scenario, figures_of(scenario.machine.name), fidelity)


def folds_evenly(scenario):
    """Whether every transfer of each class meets as many of each other class, on links as wide, as all of its class.

    Colours are refined over transfers and links until they hold (Weisfeiler and Leman 1968). Where no class is torn,
    max-min fairness gives its transfers one rate, whatever is under way, since it treats like alike.
    """
    figures = figures_of(scenario.machine.name)
    apart, folded = (build_traffic(scenario, figures, fold=fold) for fold in (False, True))
    lane_of = {replica: number for number, lane in enumerate(folded.lanes) for replica in lane.replicas}
    kind = {}
    for name, stages in (("reduce", apart.reduce), ("gather", apart.gather)):
        for stage, phases in enumerate(stages):
            for phase, exchange in enumerate(phases):
                kind |= dict.fromkeys(exchange.flows, (name, stage, phase))
    for lane in apart.lanes:
        number = lane_of[lane.replicas[0]]
        for way, boundaries in (("up", lane.up), ("down", lane.down), ("embedding", [e.flows for e in lane.embedding])):
            kind |= {flow: (way, number, b) for b, flows in enumerate(boundaries) for flow in flows}
    weights = [{row: round(weight, 9) for row, weight in rows.items()} for rows in apart.classes.weights]
    users = {}
    for flow in kind:
        for row, weight in weights[flow].items():
            users.setdefault(row, []).append((flow, weight))
    numbers = {}
    colour = {flow: numbers.setdefault((kind[flow], round(apart.classes.solo[flow], 3)), len(numbers)) for flow in kind}
    count = 0
    while count < len(set(colour.values())) <= len(set(kind.values())):
        count = len(set(colour.values()))
        load = {}
        for row, flows in users.items():
            total = {}
            for flow, weight in flows:
                total[colour[flow]] = total.get(colour[flow], 0.0) + weight
            what = (apart.classes.capacity[row], *sorted((c, round(w, 9)) for c, w in total.items()))
            load[row] = numbers.setdefault(what, len(numbers))
        for flow in kind:
            what = (colour[flow], *sorted({(load[row], weight) for row, weight in weights[flow].items()}))
            colour[flow] = numbers.setdefault(what, len(numbers))
    return len(set(colour.values())) == len(set(kind.values()))


# Jobs and what is wrong with them


@st.composite
def jobs(draw, perturbed=False):
    machine = draw(st.sampled_from(MACHINES))
    layout = {
        "tp": draw(st.sampled_from((1, 2, 4, 8))),
        "pp": draw(st.integers(1, 4)),
        "dp": draw(st.sampled_from((1, 2, 3, 4, 6, 8))),
        "micro_batches": draw(st.sampled_from((1, 2, 5))),
    }
    devices, per_node = layout["tp"] * layout["pp"] * layout["dp"], load_machine(machine).devices_per_node
    assume(devices > 1 and (devices % per_node == 0 or devices < per_node))
    placement = {"order": draw(st.sampled_from(ORDERS))}
    if machine != "fugaku":
        placement["nodes"] = draw(st.sampled_from(("contiguous", "spread")))
        if draw(st.booleans()):
            placement["device_order"] = draw(st.permutations(range(8)))
    framework = draw(st.sampled_from(("megatron", "megatron-deepspeed")))
    all_reduce = draw(st.sampled_from((None, None, "ring", "recursive_doubling", "halving_doubling")))
    nodes = -(-devices // per_node)
    perturb = draw(troubles(machine, nodes, devices)) if perturbed else {}
    return {
        "machine": machine,
        **layout,
        "framework": framework,
        "placement": placement,
        "perturb": perturb,
        "all_reduce": all_reduce,
    }


@st.composite
def troubles(draw, machine, nodes, ranks):
    node = st.integers(0, nodes - 1)
    speed, rate = st.sampled_from((0.5, 0.8, 0.95)), st.sampled_from((0.25, 0.5))
    nic = st.sampled_from([nic.name for nic in load_machine(machine).node.nics])
    kinds = {
        "slow rank": {"devices": [{"rank": draw(st.integers(0, ranks - 1)), "speed": draw(speed)}]},
        "slow node": {"devices": [{"node": draw(node), "speed": draw(speed)}]},
        "slow NIC": {"nics": [{"node": draw(node), "nic": draw(nic), "rate": draw(rate)}]},
        "failed NIC": {"nics": [{"node": draw(node), "nic": draw(nic), "rate": 0}]},
        "jitter": {"jitter": {"spread": 0.1, "seed": draw(st.integers(0, 9))}},
    }
    if machine == "frontier":
        pair = draw(st.sampled_from(([0, 1], [1, 3], [2, 4])))
        kinds["link in a node"] = {"links": [{"node": draw(node), "between": pair, "rate": draw(rate)}]}
        kinds["links between groups"] = {"links": [{"groups": [0, 1], "rate": draw(rate)}]}
    if nodes > 1:
        source, target = draw(st.lists(node, min_size=2, max_size=2, unique=True))
        kinds["background"] = {"background": [{"source": source, "target": target, "rate": "10 GB/s"}]}
    chosen = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=2, unique=True))
    found = {}
    for name in chosen:
        for key, value in kinds[name].items():
            found[key] = found.get(key, []) + value if isinstance(value, list) else value
    return found


def same_but_for_the_fold(case):
    scenario = job(**case)
    folded, apart = play(scenario, "des-exact"), play(scenario, "des-per-rank")
    if folds_evenly(scenario):
        assert folded.step_s == pytest.approx(apart.step_s, rel=EXACT)
    else:
        assert UNEVEN[0] <= folded.step_s / apart.step_s - 1 <= UNEVEN[1]
    assert folded.engine.lanes <= apart.engine.lanes == scenario.dp


@settings(max_examples=60)
@given(jobs())
def test_a_folded_job_takes_as_long_as_all_its_ranks(case):
    same_but_for_the_fold(case)


@settings(max_examples=60)
@given(jobs(perturbed=True))
def test_a_disturbed_job_is_split_as_far_as_it_must(case):
    same_but_for_the_fold(case)


@pytest.mark.parametrize(
    "case",
    [
        {"tp": 8, "pp": 4, "dp": 2},
        {"tp": 4, "pp": 4, "dp": 4, "placement": {"order": "tp-pp-dp"}},
        {"tp": 8, "pp": 2, "dp": 8, "all_reduce": "tree"},
        {"tp": 2, "pp": 4, "dp": 16, "all_reduce": "hierarchical"},
        {"tp": 2, "pp": 4, "dp": 4, "framework": "megatron-deepspeed"},
        {"machine": "selene", "tp": 8, "pp": 4, "dp": 3, "placement": {"nodes": "spread"}},
        {"machine": "fugaku", "tp": 4, "pp": 4, "dp": 4},
        {"tp": 8, "pp": 4, "dp": 3, "perturb": {"devices": [{"rank": 9, "speed": 0.8}]}},
        {"tp": 8, "pp": 4, "dp": 3, "perturb": {"nics": [{"node": 4, "nic": "hsn1", "rate": 0.5}]}},
        {"tp": 8, "pp": 4, "dp": 3, "perturb": {"jitter": {"spread": 0.2}}},
    ],
    ids=str,
)
def test_usual_layouts_fold_without_loss(case):
    """Nodes hold whole tensor groups of one stage, or whole pipelines: no class has members that are better off."""
    scenario = job(**case)
    folded, apart = play(scenario, "des-exact"), play(scenario, "des-per-rank")
    assert folded.step_s == pytest.approx(apart.step_s, rel=EXACT)
    for one, other in zip(folded.stages, apart.stages, strict=True):
        assert one.end_s == pytest.approx(other.end_s, rel=EXACT)


def test_a_fold_that_hides_something_is_too_slow_by_the_residue_stated():
    """Replicas of six ranks fill nodes of eight: two of four have a boundary inside a node that crosses for the others.

    The folded boundary has the rate of its slowest message for all replicas.
    """
    scenario = job(tp=2, pp=3, dp=4, micro_batches=5, placement={"order": "tp-pp-dp"})
    assert not folds_evenly(scenario)
    folded, apart = play(scenario, "des-exact"), play(scenario, "des-per-rank")
    assert folded.step_s / apart.step_s - 1 == pytest.approx(0.0138, abs=0.001)


def test_a_fold_that_holds_some_back_leaves_links_to_others_by_the_residue_stated():
    """Tensor ranks in no order of their devices, and six ranks a stage on nodes of eight: no two messages are alike.

    The folded boundary keeps its quick messages to the rate of its slowest, and what they leave quickens others.
    """
    order = [0, 5, 2, 4, 6, 1, 3, 7]
    slow = {"devices": [{"rank": 0, "speed": 0.8}]}
    scenario = job(tp=2, pp=4, dp=3, micro_batches=5, placement={"device_order": order}, perturb=slow)
    assert not folds_evenly(scenario)
    folded, apart = play(scenario, "des-exact"), play(scenario, "des-per-rank")
    assert folded.step_s / apart.step_s - 1 == pytest.approx(-0.0023, abs=0.001)


# What a fold loses on the bundled runs that every rank can be played of; des-per-rank plays the others in minutes.
BUNDLED = {
    "crusher-175b": EXACT,
    "frontier-22b": 3e-5,  # two stages of eight GCDs lie differently to the four NICs of their nodes
    "h100-llama-3-8b": EXACT,
    "lumi-175b": EXACT,
    "lumi-175b-256": EXACT,
    "lumi-33b": EXACT,
    "lumi-7b": EXACT,
    "selene-175b": EXACT,
}


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_runs_are_folded_without_loss(name):
    scenario = load_scenario(name)
    folded, apart = (predict(scenario, fidelity=fidelity) for fidelity in ("des-exact", "des-per-rank"))
    assert folded.step_s == pytest.approx(apart.step_s, rel=BUNDLED[name])


# What a perturbation may do


@settings(max_examples=50)
@given(jobs(perturbed=True))
def test_what_goes_wrong_makes_nothing_faster(case):
    """Exactly so where no two transfers ever share a link and none is turned to another; else but for what desyncs."""
    assume("jitter" not in case["perturb"])  # which may draw a good day
    disturbed, sound = play(job(**case), "des-per-rank"), play(job(**case | {"perturb": {}}), "des-per-rank")
    turned = any(trouble.get("rate") == 0 for trouble in case["perturb"].get("nics", ()))
    alone = sound.engine.solves == disturbed.engine.solves == 0
    least = 1 - EXACT if alone and not turned else 1 - GAIN
    assert disturbed.step_s >= sound.step_s * least


STAGE_A_NODE = {"tp": 8, "pp": 4, "dp": 6}  # on Frontier stage s of replica r is node 6 s + r


@pytest.mark.parametrize(
    ("perturb", "lanes"),
    [
        pytest.param({}, 1, id="nothing"),
        pytest.param({"devices": [{"rank": 3, "speed": 1.0}]}, 1, id="a device as fast as the others"),
        pytest.param({"links": [{"groups": [0, 6], "rate": 0}]}, 1, id="links to a group that the job is not in"),
        pytest.param({"devices": [{"rank": 3, "speed": 0.8}]}, 2, id="a slow device"),
        pytest.param({"devices": [{"node": 8, "speed": 0.8}]}, 2, id="a slow node"),
        pytest.param({"devices": [{"node": 2, "speed": 0.8}, {"node": 8, "speed": 0.5}]}, 2, id="one replica twice"),
        pytest.param({"devices": [{"node": 6, "speed": 0.8}, {"node": 8, "speed": 0.8}]}, 2, id="two alike"),
        pytest.param({"devices": [{"node": 6, "speed": 0.8}, {"node": 8, "speed": 0.7}]}, 3, id="two unlike"),
        pytest.param({"devices": [{"node": 2, "speed": 0.8}, {"node": 9, "speed": 0.8}]}, 3, id="two stages"),
        pytest.param({"nics": [{"node": 9, "nic": "hsn0", "rate": 0.5}]}, 2, id="a slow NIC"),
        pytest.param({"nics": [{"node": 9, "nic": "hsn0", "rate": 0}]}, 2, id="a failed NIC"),
        pytest.param({"links": [{"node": 9, "between": [0, 1], "rate": 0.5}]}, 2, id="a slow link in a node"),
        pytest.param({"background": [{"source": 0, "target": 1, "rate": "5 GB/s"}]}, 3, id="out of one, into another"),
        pytest.param({"jitter": {"spread": 0.1}}, 6, id="jitter"),
    ],
)
def test_lanes_are_as_few_as_what_is_wrong_allows(perturb, lanes):
    disturbed = play(job(**STAGE_A_NODE, perturb=perturb), "des-exact")
    assert disturbed.engine.lanes == lanes
    if lanes == 1:
        assert disturbed.step_s == play(job(**STAGE_A_NODE), "des-exact").step_s


def test_links_between_groups_split_the_replicas_that_cross_them():
    """Eight replicas of three nodes over two groups of twelve: the replicas that stay in one group are one lane."""
    case = {"tp": 8, "pp": 3, "dp": 8}
    placement = {"order": "tp-pp-dp", "nodes": "spread", "groups": 2}
    slow = {"links": [{"groups": [0, 1], "rate": 0.25}]}
    assert play(job(**case, placement=placement, perturb=slow), "des-exact").engine.lanes == 1
    apart = play(job(**case | {"dp": 7}, placement=placement, perturb=slow), "des-exact")
    assert apart.engine.lanes == 2  # the fourth of seven lies in both


@pytest.mark.parametrize("fidelity", ["des", "des-exact", "des-per-rank", "recurrence"])
def test_the_same_seed_gives_the_same_answer_and_another_seed_another(fidelity):
    def step_s(seed):
        return play(job(dp=2, pp=2, perturb={"jitter": {"spread": 0.1, "seed": seed}}), fidelity).step_s

    assert step_s(1) == step_s(1) != step_s(2)


def test_a_perturbation_that_names_nothing_is_an_error():
    for perturb in (
        {"nics": [{"node": 99, "nic": "hsn0", "rate": 0.5}]},
        {"nics": [{"node": 0, "nic": "hsn9", "rate": 0.5}]},
        {"links": [{"node": 0, "between": [2, 6], "rate": 0.5}]},
        {"links": [{"groups": [5, 6], "rate": 0.5}]},
        {"devices": [{"rank": 999, "speed": 0.5}]},
        {"background": [{"source": 0, "target": 99, "rate": "1 GB/s"}]},
    ):
        with pytest.raises(InputError):
            play(job(**STAGE_A_NODE, perturb=perturb), "des-exact")
