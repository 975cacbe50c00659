"""Shard a model, predict and report its memory and traffic, and unshard it for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from npuzero import comm
from npuzero.checkpoint.weight_files.read_weights import Weights, parse_weights
from npuzero.comm import Mesh, World
from npuzero.config import SETTING_KEYWORDS, Environment, SettingRule, Settings, describe_value, public_name
from npuzero.errors import ConfigError, did_you_mean, refuse_unknown_keywords
from npuzero.parallel.mesh import find_training_ranks
from npuzero.parallel.pipeline_parallel.runner import Pipeline
from npuzero.plan import MeshShape, Plan, PrecisionLike, Report
from npuzero.shard import build
from npuzero.shard.engine import Engine
from npuzero.shard.find_engine import engine_of, not_sharded_error, split_by_engine
from npuzero.shard.layout.find_units import UnitRule
from npuzero.shard.layout.unit_plans import UnitPlans
from npuzero.shard.state.initial_values import InitialValues
from npuzero.shard.state_dict import attach_engine
from npuzero.shard.step.module_buffers import BUFFER_RULES

PlanLike = Plan | str | int | float
#: Keeps the model's class for type checkers.
Model = TypeVar("Model", bound=nn.Module)

_TIMEOUT: SettingRule = Environment.__dataclass_fields__["timeout_s"].metadata["rule"]


@refuse_unknown_keywords()
def init(
    device: str | torch.device | None = None, *, timeout_s: float | None = None, backend: str | None = None
) -> World:
    """Join the process group; call it before :func:`zero`, in a program started by torchrun or as a single process.

    A second call returns the same world; after ``world.close()`` on every rank it makes a new one.

    Args:
        device: None means this rank's accelerator if there is one, else the CPU.
        timeout_s: seconds after which a waiting collective raises CollectiveError; None means NPUZERO_TIMEOUT_S, or
            600.
        backend: None chooses by the device: npu hccl, cuda nccl, cpu shared memory on one host and gloo beyond it.

    Returns:
        The world: ``rank``, ``size`` and ``device`` of this process.

    Raises:
        ConfigError: the environment is incomplete, the device or backend is missing, or this process is in a world with
            other settings.

    Example::

        world = npuzero.init()  # joins the ranks that torchrun started; one process stands alone
        print(f"rank {world.rank} of {world.size} on {world.device}")
    """
    wait_s = None if timeout_s is None else _TIMEOUT.check("init: timeout_s", timeout_s)
    return comm.process_world(device, timeout_s=wait_s, backend=backend)


@refuse_unknown_keywords(preset="plan", strategy="plan", dtype="precision", **SETTING_KEYWORDS)
def zero(  # noqa: PLR0913 - all there is to choose, by name
    model: Model,
    stage: int | float | None = None,
    *,
    plan: Plan | str | None = None,
    precision: PrecisionLike = None,
    local_size: int | None = None,
    offload: str | None = None,
    units: UnitRule = None,
    unit_plans: Mapping[str, PlanLike] | None = None,
    weights: str | Path | Weights | None = None,
    initialize: Callable[[nn.Module], object] | None = None,
    buffers: str | None = None,
    world: World | None = None,
    mesh: Mesh | None = None,
    settings: Settings | None = None,
) -> Model:
    """Shard ``model`` over the ranks, in place, and return it.

    The training loop stays the same: forward, ``loss.backward()``, an npuzero optimizer's ``step()``. All ranks start
    from rank 0's weights and buffers. Gradients are averaged over all ranks.

    Args:
        model: on this rank's device, or on meta (shapes without data), the same on every rank. Parameters must be
            float32, bfloat16 or float16.
        stage: ZeRO stage 0, 1, 1.5, 2 or 3 (the default, unless ``plan`` is given).
        plan: a preset's name (see :data:`npuzero.PRESETS`, :data:`npuzero.OFFLOADED`,
            :data:`npuzero.THINNED`) or a :class:`Plan`.
        precision: a name of :data:`npuzero.PRECISIONS` such as ``"bf16"``, the dtype that the parameters (and the
            root's floating inputs) are converted to, or a :class:`Precision`. None keeps each parameter's dtype.
        local_size: ranks in a group, for presets that shard within groups; None: the ranks of a host; <= 0: all.
        offload: offload optimizer states under any stage or plan: ``"host"`` to the host, with gradients that are
            sharded the same way; ``"nvme"`` to files instead; ``"host+parameters"`` or ``"nvme+parameters"`` with
            parameters as well. See :meth:`Plan.offloaded`.
        units: modules whose parameters are gathered together: a class, a tuple of classes, or a predicate of (name,
            module). By default the children of each outermost repeated list.
        unit_plans: plans of single units by name (``"root"``, ``"blocks.3"``) in place of the model's: presets, stages
            or :class:`Plan`. They use the model's ``local_size``, and its precision unless they are a Plan.
        weights: safetensors to load: a file, a folder with ``model.safetensors`` or its index, or
            :class:`npuzero.Weights`. Each rank reads only the bytes of its shards.
        initialize: fills tensors on meta that ``weights`` lacks. It is called unit by unit with the modules that have
            such parameters and buffers, inner ones first, as by ``model.apply``; other units are on meta at that time.
            None: the modules' ``reset_parameters()``. Rank 0's values count.
        buffers: how ranks share buffers that a forward writes, such as BatchNorm's statistics, when the next forward
            begins: ``"broadcast"`` from rank 0, as in DDP; ``"average"`` floating buffers and broadcast the rest; None
            keeps each rank's own.
        world: the ranks; None: those of :func:`init`, which is called if needed.
        mesh: the same ranks along named axes, if there are other than data axes: see :func:`npuzero.mesh`. None: the
            mesh given to ``parallel.tensor``, ``parallel.sequence`` or ``ClassHead``, if any.
        settings: overlap, prefetch, ...; no setting changes the numbers.

    Raises:
        ConfigError: the plan, precision, model or world is unusable, ranks disagree, the model does not use an axis of
            the mesh, or a tensor on meta has no source of values.
        CheckpointError: ``weights`` are missing, torn, or do not fit the model.
        StateError: the model is sharded already.

    Example::

        world = npuzero.init()
        model = npuzero.zero(net.to(world.device), stage=3, precision="bf16")
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
    """
    _check_kind("npuzero.zero()", model, nn.Module, "Pass the model itself.")
    settings = checked_settings(settings)
    if buffers is not None:
        SettingRule(str, "how ranks share buffers; leave it out and each keeps its own", choices=BUFFER_RULES).check(
            "npuzero.zero(): buffers", buffers
        )
    with contextlib.ExitStack() as files:
        values = None if weights is None else files.enter_context(contextlib.closing(parse_weights(weights)))
        origin = InitialValues(values, initialize)
        plans = UnitPlans.named(chosen_plan(stage, plan, precision, local_size), unit_plans, offload)
        ranks = find_training_ranks(model, world, mesh) or comm.current_world()
        engine = Engine(model, plans, ranks, settings, units, origin, buffers)
    attach_engine(engine, model)
    return model


@refuse_unknown_keywords(preset="plan", stage="plan", dtype="precision", world_size="world")
def predict(  # noqa: PLR0913 - the facts of a step, a name each
    model: nn.Module,
    plan: PlanLike,
    world: int | World | Mesh | MeshShape,
    *,
    local_size: int | None = None,
    offload: str | None = None,
    precision: PrecisionLike = None,
    units: UnitRule = None,
    unit_plans: Mapping[str, PlanLike] | None = None,
    micro_batches: int = 1,
    clip: bool = False,
    moments: int = 2,
    parts: Sequence[Iterable[nn.Module | str]] = (),
    acts: Sequence[tuple[int, bool]] = (),
    activation_bytes: int = 0,
    settings: Settings | None = None,
) -> Report:
    """Predict by arithmetic the memory and traffic of one of ``world`` ranks in one step of ``model`` under ``plan``.

    Args:
        model: may be on ``meta``; nothing is computed. The result of :func:`pipeline` has its own units, parts and
            acts.
        plan: a Plan, a preset's name, or a stage.
        world: the number of ranks, or the world of :func:`init`; or a mesh, or the sizes of its axes.
        local_size, offload, precision, units, unit_plans, settings: as for :func:`zero`.
        micro_batches: forward and backward passes per step, none of them under ``no_sync``.
        clip: whether :func:`clip_grad_norm_` is called once per step.
        moments: optimizer states per element without the master: Adam has 2, with amsgrad 3; Lion has 1.
        parts: of a model that runs in separate parts, as a pipeline's stages: the modules or names of each part; () for
            one part.
        acts: the passes of parts in order, as (part's number, whether it is a backward pass), each part's passes in the
            order of their micro-batches; () for ``micro_batches`` of the full model, one after another.
        activation_bytes: in a pipeline, bytes of a micro-batch between two stages, per rank.

    Raises:
        ConfigError: as for :func:`zero`; or acts that do not fit the parts.

    Example::

        report = npuzero.predict(net, "zero3", world=64, local_size=8, precision="bf16")
        print(report.bytes_held["states"], report.bytes_sent["all_gather"])
    """
    _check_kind("npuzero.predict()", model, nn.Module, "Pass the model itself.")
    if isinstance(model, Pipeline) and not acts:
        units, parts, acts = model.unit_rule, model.parts, model.acts
    chosen = chosen_plan(None, plan, precision, local_size)
    facts = {"micro_batches": micro_batches, "clip": clip, "moments": moments, "acts": acts}
    plans = UnitPlans.named(chosen, unit_plans, offload)
    foreseen = build.predict_model(model, plans, world, units, checked_settings(settings), parts, **facts)
    return model.with_sends(foreseen, activation_bytes) if isinstance(model, Pipeline) else foreseen


def report(model: nn.Module) -> Report:
    """Report the bytes that this rank held (high water) and sent in the last step, in the shape of :func:`predict`.
    Inside :func:`offloaded` it reports the bytes held now, and the bytes moved by the offload.

    Raises:
        StateError: the model is not sharded, or has taken no step.

    Example::

        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model(x).sum().backward()  # a step ends where the next one begins
        print(npuzero.report(model).bytes_held)
    """
    return engine_of(model).report()


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Sum gradients locally in backward passes inside the block; the next pass outside it reduces them.

    Fewer bytes are sent; a plan that shards gradients then keeps them unsharded (float32) until that next pass.

    Example::

        with npuzero.no_sync(model):
            model(x).mean().backward()  # adds up, sends nothing
        model(x).mean().backward()  # reduces the sum of both
        optimizer.step()
    """
    with engine_of(model).passes.no_sync():
        yield


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make the method ``name`` of ``module`` unshard the parameters that it uses, as the forward does.

    For methods other than ``forward`` that use parameters directly, such as ``encode(x)`` with ``x @ self.projection``;
    a method that only calls modules does not need it. All ranks call it together, as a forward. It unshards the
    parameters of ``module`` and of the units around it; units inside are unsharded when they are called.

    Args:
        module: a model made by :func:`zero`, or a module inside.
        name: of a method of its class.

    Raises:
        StateError: ``module`` has no parameter of a sharded model.
        ConfigError: its class has no such method.

    Example::

        class Encoder(nn.Linear):
            def encode(self, x):
                return x @ self.weight.T

        encoder = npuzero.zero(Encoder(8, 8).to(world.device))
        npuzero.register_forward_method(encoder, "encode")
        encoder.encode(x).sum().backward()
    """
    _check_kind("npuzero.register_forward_method()", module, nn.Module, "Pass the module that has the method.")
    engines, _ = split_by_engine(module.parameters())
    if not engines:
        raise not_sharded_error(module)
    method = getattr(type(module), name, None) if isinstance(name, str) else None
    if not callable(method):
        raise ConfigError(
            "npuzero.register_forward_method()",
            expected=f"the name of a method of {type(module).__name__}",
            got=describe_value(name),
            do=did_you_mean(name, dir(type(module)), "Name a method that its class defines, e.g. 'encode'."),
        )
    for engine in engines:
        engine.register_forward_method(module, name, method)


@contextlib.contextmanager
def gathered(model: Model, *, write: bool = False) -> Iterator[Model]:
    """Unshard all parameters inside the block, to be read and written, on every rank. Collective.

    Writes to parameters inside the block persist under every plan: shards and masters follow. All ranks must write the
    same values. Without ``write`` this holds for writes that torch sees: in-place operations, also through ``p.data``
    and ``p.detach()``.

    Args:
        model: made by :func:`zero`.
        write: compare the values themselves, so that writes past torch (through ``p.numpy()``, by another library)
            persist as well; this reads all parameters twice.

    Raises:
        StateError: on every rank, at the end of the block: the ranks wrote different values.

    Example::

        with npuzero.gathered(model):
            for parameter in model.parameters():
                parameter.data.clamp_(-1, 1)  # lasts: this rank's shards follow
    """
    with engine_of(model).values.gathered(write):
        yield model


def chosen_plan(
    stage: PlanLike | None, plan: PlanLike | None, precision: PrecisionLike, local_size: int | None
) -> Plan:
    """Return the plan given by a stage, a preset or a Plan."""
    if stage is not None and plan is not None:
        raise ConfigError(
            "npuzero.zero()", expected="either stage or plan", got=f"stage={stage!r} and plan={plan!r}", do="Drop one."
        )
    chosen = plan if plan is not None else (3 if stage is None else stage)
    if not isinstance(chosen, Plan):
        return Plan.preset(chosen, precision=precision, local_size=local_size)
    if precision is not None or local_size is not None:
        raise ConfigError(
            "npuzero.zero()",
            expected="precision and local_size inside the Plan",
            got="both a Plan and these arguments",
            do="Use Plan.preset(name, precision=..., local_size=...), or set plan.precision.",
        )
    return chosen


def checked_settings(settings: Settings | None) -> Settings:
    """Return ``settings``, or the default ones."""
    if settings is None:
        return Settings()
    _check_kind("settings", settings, Settings, "Use npuzero.Settings(...), or Settings.from_dict(...) for a dict.")
    return settings


def _check_kind(subject: str, value: object, kind: type, do: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(subject, expected=f"a {public_name(kind)}", got=describe_value(value), do=do)


def apply_pending(model: nn.Module) -> None:
    """Apply the pending update of a plan with ``lag=1`` now, instead of in the next ``step()``. Collective.

    Call it when training ends, and before parameters are written. Under other plans, and if no update is pending, it
    does nothing.

    Raises:
        NpuZeroError: the update has failed.

    Example::

        model = npuzero.zero(net, plan="delayed")
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
        model(x).mean().backward()
        optimizer.step()  # changes nothing yet
        npuzero.apply_pending(model)  # now it has
    """
    engine_of(model).apply_pending()
