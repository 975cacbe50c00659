"""Functions on a model: shard it, look at it, unshard it for a while."""

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
#: A model stays what it is to a type checker, too.
Model = TypeVar("Model", bound=nn.Module)

_TIMEOUT: SettingRule = Environment.__dataclass_fields__["timeout_s"].metadata["rule"]


@refuse_unknown_keywords()
def init(
    device: str | torch.device | None = None, *, timeout_s: float | None = None, backend: str | None = None
) -> World:
    """Join the other ranks; call it before :func:`zero`, in a program started by torchrun (or alone).

    A second call returns the same world; after ``world.close()`` on every rank it makes a new one.

    Args:
        device: None takes the accelerator of this rank where there is one, else the CPU.
        timeout_s: after so many seconds a collective that waits raises CollectiveError; None takes
            NPUZERO_TIMEOUT_S, or 600.
        backend: None chooses by the device: npu hccl, cuda nccl, cpu shared memory on one host and gloo beyond it.

    Returns:
        The world: ``rank``, ``size`` and ``device`` of this process.

    Raises:
        ConfigError: the environment is incomplete, the device or backend is not there, or this process is in a world
            with other settings than asked for.

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

    The native loop stays as it is: forward, ``loss.backward()``, an npuzero optimizer's ``step()``. All ranks start
    from rank 0's weights and buffers. Gradients are averaged over all ranks.

    Args:
        model: on this rank's device, or on meta (shapes without data), the same on every rank. Parameters float32,
            bfloat16 or float16.
        stage: ZeRO stage 0, 1, 1.5, 2 or 3 (the default, unless ``plan`` is given).
        plan: a preset's name (see :data:`npuzero.PRESETS`, :data:`npuzero.OFFLOADED`,
            :data:`npuzero.THINNED`) or a :class:`Plan`.
        precision: a name of :data:`npuzero.PRECISIONS` such as ``"bf16"``, the dtype that the parameters (and the
            root's floating inputs) are converted to, or a :class:`Precision`. None keeps each parameter's dtype.
        local_size: ranks in a group for presets that shard within groups; None: those that share a host; <= 0: all.
        offload: what rests off the device, whatever the stage or plan: ``"host"``: states on the host, and gradients
            that are sharded as states are; ``"nvme"``: states in files instead; ``"host+parameters"`` or
            ``"nvme+parameters"``: parameters there, too. See :meth:`Plan.offloaded`.
        units: which modules are gathered as one: a class, a tuple of classes, or a predicate of (name, module). By
            default the children of each outermost repeated list.
        unit_plans: plans of single units by name (``"root"``, ``"blocks.3"``), where they have others than the model's:
            presets, stages or :class:`Plan`. Its ``local_size`` is theirs, too; and its precision, but for a Plan's.
        weights: safetensors files whose values the model is to have: a file, a folder with ``model.safetensors`` or its
            index, or :class:`npuzero.Weights`. Each rank reads the bytes that rest with it, and no others.
        initialize: fills what is on meta and not in ``weights``: called, a unit at a time, with the modules around such
            parameters and buffers, inner ones first, as by ``model.apply``; all else is on meta meanwhile. None: the
            modules' ``reset_parameters()``. Rank 0's values count.
        buffers: what becomes of what forwards write into buffers, such as BatchNorm's statistics of the rank's own
            batches, as the next forward begins: ``"broadcast"``: rank 0's count, as DDP has it; ``"average"``: floating
            buffers are averaged, others are rank 0's; None: each rank keeps its own.
        world: the ranks; None: those of :func:`init`, which is called if nobody has.
        mesh: the same ranks along named axes, where they are more than data ranks: see :func:`npuzero.mesh`. None: the
            mesh that ``parallel.tensor``, ``parallel.sequence`` or ``ClassHead`` was given, if any.
        settings: how the engine works (overlap, prefetch, ...); none of it changes the numbers.

    Raises:
        ConfigError: plan, precision, model or world that cannot work, ranks that disagree, an axis of the mesh that the
            model does not use, or a tensor on meta that nobody has values for.
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
    """Predict what one of ``world`` ranks holds and sends in one step of ``model`` under ``plan``, by arithmetic.

    Args:
        model: may be on ``meta``; nothing is computed. What :func:`pipeline` returned knows its units, parts and acts.
        plan: a Plan, a preset's name, or a stage.
        world: number of ranks, or the world that :func:`init` gave; or a mesh, or the sizes of its axes.
        local_size, offload, precision, units, unit_plans, settings: as for :func:`zero`.
        micro_batches: forward and backward passes a step, none of them under ``no_sync``.
        clip: whether :func:`clip_grad_norm_` is called once a step.
        moments: states of the optimizer beside the master: Adam has 2, with amsgrad 3; Lion has 1.
        parts: of a model whose parts run by themselves, as a pipeline's stages do: by modules or names, what is of
            each; () for one part.
        acts: the passes of parts in their order: a part's number, and whether it is a backward pass, a part's in the
            order of their micro-batches; () for ``micro_batches`` of the whole model, one after another.
        activation_bytes: of a pipeline: of a micro-batch between two stages, as each rank holds it.

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
    """Report what this rank held (high water, bytes) and sent (bytes) in the last step,
    in the shape of :func:`predict`. Inside :func:`offloaded`: what it holds now, and what that has moved.

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
    """Let backward passes inside the block add up on each rank alone; the next one outside it reduces them.

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
    """Let the method ``name`` of ``module`` be called as its forward is: with its parameters unsharded.

    For methods beside ``forward`` that use parameters themselves, such as ``encode(x)`` with ``x @ self.projection``;
    what calls modules needs nothing. Like a forward, all ranks call it together. As for a forward, unsharded is
    what ``module`` and the units around it own; units inside it are unsharded when they are called, as ever.

    Args:
        module: a model made by :func:`zero`, or a module inside of it.
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

    What is written into parameters inside lasts, under every plan: shards and masters follow it. All ranks write the
    same values. Without ``write`` this goes for what torch sees written: operations in place, also through ``p.data``
    and ``p.detach()``.

    Args:
        model: made by :func:`zero`.
        write: look at the values themselves, so that what was written past torch (through ``p.numpy()``, by another
            library) lasts as well; all parameters are read twice for that.

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
    """Return the plan that a program names by its stage, its preset, or itself."""
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
    """Return ``settings``, by default those of Settings()."""
    if settings is None:
        return Settings()
    _check_kind("settings", settings, Settings, "Use npuzero.Settings(...), or Settings.from_dict(...) for a dict.")
    return settings


def _check_kind(subject: str, value: object, kind: type, do: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(subject, expected=f"a {public_name(kind)}", got=describe_value(value), do=do)


def apply_pending(model: nn.Module) -> None:
    """Let the parameters be what the last ``step()`` makes of them, where a plan with ``lag=1`` would leave that to the
    next one. Collective.

    Call it when training ends, and before parameters are written. Elsewhere, and where nothing is pending, it does
    nothing.

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
