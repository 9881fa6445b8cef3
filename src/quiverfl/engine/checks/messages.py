"""Checks of transforms: what a method, a graph or peers do not allow, before the first round."""

from __future__ import annotations

import torch
from torch import Tensor

from quiverfl.data.federated import FederatedData
from quiverfl.engine.checks.peers import choose_message_split
from quiverfl.engine.checks.probe import ModelProbe
from quiverfl.engine.exchange.build import keeps_replicas, poison_training_data
from quiverfl.engine.exchange.compression import is_fixed
from quiverfl.engine.execution import has_compiled_layers
from quiverfl.engine.settings import RunSettings
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Interleaved, Method, SingleStep
from quiverfl.methods.optional import SizesMessages
from quiverfl.methods.state import replicated_fields
from quiverfl.support.environment import require_package
from quiverfl.task import Task
from quiverfl.topologies.topology import Topology
from quiverfl.transforms import Transforms
from quiverfl.transforms.attacks import Adaptive, ForgedMass, choose_attackers
from quiverfl.transforms.compression import RandomK, TopK
from quiverfl.transforms.privacy import DPSGD
from quiverfl.transforms.robustness import SelfCenteredClip


def check_transforms(
    transforms: Transforms,
    task: Task,
    data: FederatedData,
    method: Method,
    topology: Topology,
    settings: RunSettings,
) -> None:
    """Refuse transforms that would have no meaning, before anything is computed or written."""
    inside = {"privacy"} if isinstance(transforms.privacy, DPSGD) else set()
    for section in transforms.record().keys() - inside:
        _check_message(section, task, data, method, topology, settings)
    mixed = task.buffers == "mixed" and task.statistics_layout.names
    for section in transforms.record() if mixed else ():
        raise QuiverError(
            f'[{section}] with task.buffers = "mixed": a variance that is coded, noised or forged '
            'can become negative. Set task.buffers = "personal", or use qv.group_norm(model).'
        )
    if transforms.compression is not None:
        _check_compression(transforms, method, topology, settings)
    if transforms.robustness is not None:
        _check_robustness(transforms, method)
    if transforms.privacy is not None:
        require_package("privacy", "[privacy]")
        if topology.reports is not None:
            raise QuiverError(
                f"[privacy] with {topology.name}: clients would report their loss or model to "
                "each other, which nobody accounts for. Use a topology that does not look, such as "
                "random_push, or leave [privacy] out."
            )
    if isinstance(transforms.privacy, DPSGD):
        if task.statistics_layout.names:
            raise QuiverError(
                'privacy.name = "dp_sgd" with a model that keeps running statistics (BatchNorm): '
                "every sample changes the others' gradients, so none can be clipped by itself. "
                "Use qv.group_norm(model)."
            )
        if has_compiled_layers(task):
            raise QuiverError(
                'privacy.name = "dp_sgd" with model.kernels = "compiled": compiled layers have no '
                'gradients of single samples; set model.kernels = "torch".'
            )
        _check_private_phases(task, method)
    if isinstance(transforms.adversary, Adaptive):
        transforms.adversary.adapt_to(transforms.robustness, 0.0)
    if settings.arithmetic == "peers":
        _check_peers(transforms, method, topology, settings)
    if isinstance(transforms.adversary, ForgedMass) and method.mass is None:
        raise QuiverError(
            f'adversary.name = "forged_mass": {method.title} carries no push-sum mass to forge; '
            "choose another attack, or a push-sum method (dfedpgp, osgp)."
        )
    if task.own_models and transforms.adversary is not None and transforms.adversary.flips_labels:
        raise QuiverError(
            'adversary.name = "label_flip" with a model for each client: they do not have the same '
            "labels to flip. Choose another attack."
        )
    attackers = choose_attackers(transforms.adversary, settings.seed, topology.clients)
    if transforms.adversary is not None and len(attackers) == topology.clients:
        raise QuiverError(
            f"adversary.share = {transforms.adversary.share:g}: all {topology.clients} clients "
            "attack, and only those who do not are judged. Lower it."
        )
    poison_training_data(transforms, data, settings.seed)


def _check_message(
    section: str,
    task: Task,
    data: FederatedData,
    method: Method,
    topology: Topology,
    settings: RunSettings,
) -> None:
    """Refuse a method that sends no parameters from client to client: transforms need them."""
    out = f"Leave [{section}] out for this method."
    if method.topology == "isolated":
        raise QuiverError(f"{method.title} sends nothing, so there is no message to change. {out}")
    if isinstance(method, SizesMessages):
        raise QuiverError(
            f"{method.title} codes its messages itself (it declares their payload): what was not "
            f"sent of a numerator would be divided by what was sent of its denominator. {out}"
        )
    if topology(0).hub:
        raise QuiverError(
            f"{section} over a star: a server's average goes back whole, and a client that is "
            "not sampled has no share with which a rest could stay. Name a topology without a "
            f"server, such as random_push or random_regular, or leave [{section}] out."
        )
    state = ModelProbe.from_data(task, data, settings.dtype).first_state(method)
    if replicated_fields(type(state)):
        raise QuiverError(
            f"{method.title} keeps a server's state of which every client has the same copy; what "
            f"one client leaves out or alters would make copies differ. {out}"
        )
    _check_leaves(section, task, method, method.message(state))


def _check_private_phases(task: Task, method: Method) -> None:
    """Every use of the data must be a gradient that is clipped and noised."""
    for phase in method.phases(task):
        for part in phase.phases if isinstance(phase, Interleaved) else (phase,):
            other_use = (
                bool(part.needs_gradient) or part.statistics is not None
                if isinstance(part, SingleStep)
                else part.lookahead is not None
                or (
                    part.loss is not None
                    and (part.loss.teachers is not None or part.loss.needs_weights)
                )
            )
            if other_use:
                raise QuiverError(
                    f'privacy.name = "dp_sgd": {method.title} looks at its data otherwise than by '
                    "the gradient of one batch after another (a second gradient, statistics or "
                    "teachers), which would not be private. Choose another method, or "
                    'privacy.name = "update".'
                )


def _check_robustness(transforms: Transforms, method: Method) -> None:
    if method.delay:
        raise QuiverError(
            f"robustness with method.delay = {method.delay}: a receiver would compare a late model "
            "with what it has itself by then. Set delay to 0, or leave [robustness] out."
        )
    if isinstance(transforms.compression, TopK | RandomK):
        raise QuiverError(
            f"robustness with compression.name = {transforms.compression.name!r}: some of a "
            "model's numbers cannot be compared with all of one's own. Quantize instead, or leave "
            "one of the two out."
        )


def _check_compression(
    transforms: Transforms, method: Method, topology: Topology, settings: RunSettings
) -> None:
    if settings.dtype not in (torch.float32, torch.float64):
        raise QuiverError(
            f"dtype = {settings.dtype}: compression codes float32 and float64; use one of them."
        )
    if keeps_replicas(transforms, method, topology, settings.rounds):
        _check_replicas(method, topology, settings)


def _check_peers(
    transforms: Transforms, method: Method, topology: Topology, settings: RunSettings
) -> None:
    """Refuse what peers cannot do; a simulation of peers cannot do it either."""
    rule = transforms.robustness
    if keeps_replicas(transforms, method, topology, settings.rounds):
        raise QuiverError(
            f"compression with {method.title} over {topology.name}: differences to replicas "
            "(CHOCO-SGD) would be sent, and peers keep none: a neighbour that is late or passed "
            "over would follow another replica than the others. Set compression.feedback = "
            '"remainder": what is not sent stays with its sender.'
        )
    if isinstance(transforms.adversary, Adaptive) and transforms.adversary.distance is None:
        raise QuiverError(
            'adversary.name = "adaptive": a peer that attacks does not ask for the rule of the '
            "others. Give adversary.distance, such as 0.9 (times the norm of a model)."
        )
    if isinstance(transforms.adversary, ForgedMass):
        raise QuiverError(
            'adversary.name = "forged_mass": peers count mass in signed books, and nobody can '
            "claim another; choose another attack."
        )
    if rule is not None and rule.sketch is not None:
        raise QuiverError(
            f"robustness.sketch = {rule.sketch}: peers send no sketch ahead, they compare "
            "the message itself. Leave sketch out."
        )
    shares = choose_message_split(method, topology, settings.rounds) == "shares"
    if isinstance(rule, SelfCenteredClip) and shares:
        raise QuiverError(
            'robustness.name = "clip" takes a part of a share, and a peer gives a share back whole '
            'or not at all. Use "balance" or "norm", or random_pull, where copies are weighed.'
        )


def _check_leaves(section: str, task: Task, method: Method, message: dict[str, Tensor]) -> None:
    """Sums of parameters can be completed later; ratios of sums cannot."""
    sizes = {(task.shared_layout.size,), (task.personal_layout.size,)}
    for name, leaf in message.items():
        if name != method.mass and tuple(leaf.shape) not in sizes:
            raise QuiverError(
                f"{method.title} sends {name!r} of shape {tuple(leaf.shape)} beside parameters or "
                "in their place and divides by what arrives of it: what was not sent of a "
                f"numerator would be divided by a denominator that was. [{section}] is for methods "
                "that send parameters alone, or with a push-sum mass (dfedpgp, osgp, dfedavgm). "
                "Leave it out for this method."
            )


def _check_replicas(method: Method, topology: Topology, settings: RunSettings) -> None:
    if method.mass is not None:
        raise QuiverError(
            f'compression.feedback = "replica": {method.title} has a push-sum mass, which is sent '
            "whole; a model that follows replicas would not match it. Leave feedback out: what is "
            "not sent stays with its sender."
        )
    if not is_fixed(topology, settings.rounds):
        raise QuiverError(
            f'compression.feedback = "replica": the graph of {topology.name} changes, and a new '
            "neighbour has no replica. Use a graph that stays the same (ring, torus, exponential) "
            'without participation or link failures, or feedback = "remainder".'
        )
