"""Run torch optimizers over offloaded shards: masters and gradient of a flat parameter on the host, all at once."""

from __future__ import annotations

import torch
from torch import Tensor

from npuzero.errors import ConfigError
from npuzero.plan import Memory
from npuzero.shard.engine import Engine
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.tiered_tensor import copy_rounded


class HostOptimizerInputs:
    """Hold the inputs of a torch optimizer for one flat parameter on the host.

    Attributes:
        master: [n/S] float32; the masters, or a copy of the parameters if those are the masters.

    Raises:
        ConfigError: some states are placed on NVMe or on the device, or the plan delays updates.
    """

    def __init__(self, engine: Engine, flat: FlatParameter) -> None:
        rest = flat.rests.states
        if rest.memory is not Memory.HOST or rest.near or flat.rests.parameters.memory is Memory.NVME:
            raise ConfigError(
                f"ZeroOptimizer over a model of plan {flat.plan.name!r}",
                expected="states on the device, or all of them on the host: torch's optimizers have them in memory",
                got=f"{rest.numel - rest.near} of {rest.numel} elements of each shard on {rest.memory.value}, "
                f"parameters on {flat.rests.parameters.memory.value}",
                do="Use npuzero.AdamW or another fused optimizer of npuzero, or let all states rest on the host.",
            )
        if flat.plan.lag:
            raise ConfigError(
                f"ZeroOptimizer over a model of plan {flat.plan.name!r}",
                expected="a plan without lag: torch's optimizers update within their step()",
                got="lag=1",
                do="Use npuzero.AdamW or another fused optimizer of npuzero, or the plan without lag.",
            )
        self.master: Tensor
        self._low: Tensor | None
        self._flat = flat
        self._mover = engine.spaces.mover
        host = engine.spaces.host
        self._here = flat.rests.parameters.memory is Memory.HOST  # parameters on the host need no copy
        if flat.masters == "fp32":
            own = flat.own_parameters if self._here else host.allocate(rest.numel, flat.dtype, "buffers")
            self.master, self._low = engine.far.whole(flat), own
        else:
            own = flat.own_parameters if self._here else host.allocate(rest.numel, torch.float32, "buffers")
            self.master, self._low = own, None
        self._gradient: Tensor | None = None
        if flat.rests.gradients.memory is Memory.DEVICE:
            self._gradient = host.allocate(rest.numel, torch.float32, "buffers")

    def fetch(self) -> Tensor:
        """Copy gradient and masters to the host if needed; return the gradient."""
        self._mover.follow()
        if self._low is None and not self._here:
            self._mover.to_host(self.master, self._flat.own_parameters)
        if self._gradient is not None:
            self._mover.to_host(self._gradient, self._flat.own_gradient)
        self._mover.quiet()
        return self._flat.own_gradient if self._gradient is None else self._gradient

    def store(self) -> None:
        """Copy the updated parameters to the device."""
        if self._low is not None:
            copy_rounded(self.master, self._low)
        if not self._here:
            self._mover.to_device(self._flat.own_parameters, self.master if self._low is None else self._low).wait()
