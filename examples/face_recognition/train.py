"""Train a network to know faces of 100,000 people apart, by Partial-FC: on one rank, or on several by torchrun.

The faces are made up: each person has a pattern, and each picture is that and noise. Nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npuzero
from npuzero import parallel

parser = argparse.ArgumentParser()
parser.add_argument("--classes", type=int, default=100_000, help="people")
parser.add_argument("--sample-rate", type=float, default=0.1, help="the part of them that takes part in a step")
parser.add_argument("--margin", choices=("arcface", "cosface", "none"), default="arcface")
parser.add_argument("--features", type=int, default=64)
parser.add_argument("--batch", type=int, default=256, help="pictures a step, of all ranks together")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--plan", default="zero2")
options = parser.parse_args()

MARGINS = {"arcface": parallel.ArcFace(m=0.3, s=32.0), "cosface": parallel.CosFace(m=0.2, s=32.0), "none": None}
SIDE, NOISE = 12, 0.7
PATTERNS = torch.randn(options.classes, SIDE * SIDE, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


class Recognizer(nn.Module):
    """A small network from pictures to features, and the head over all people."""

    def __init__(self, mesh: npuzero.Mesh) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(32 * (SIDE // 2) ** 2, options.features),
        )
        self.head = parallel.ClassHead(
            options.features, options.classes, mesh, options.sample_rate, MARGINS[options.margin]
        )

    def forward(self, pictures: Tensor, people: Tensor | None = None) -> Tensor:
        """Return the loss of pictures [b, 1, side, side] of people [b], or their features [b, f]."""
        features = self.body(pictures)
        return features if people is None else self.head(features, people)


def pictures_of(people: Tensor, generator: torch.Generator) -> Tensor:
    """Make a picture of each: [b, 1, side, side]."""
    noise = torch.randn(len(people), SIDE * SIDE, generator=generator)
    return (PATTERNS[people] + NOISE * noise).view(-1, 1, SIDE, SIDE)


def batch(number: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch, which is the same on any number of ranks. Some people have more pictures."""
    generator = torch.Generator().manual_seed(1 + number)
    people = (torch.rand(options.batch, generator=generator).pow(3) * options.classes).long()
    pictures = pictures_of(people, generator)
    return pictures.chunk(size)[rank], people.chunk(size)[rank]


@torch.no_grad()
def verify(model: nn.Module, device: torch.device) -> tuple[float, float]:
    """Return the mean cosine of two pictures of a person, and of two people; over pictures not seen in training."""
    generator = torch.Generator().manual_seed(0)
    people = torch.arange(min(options.classes, 128))
    one, other = (F.normalize(model(pictures_of(people, generator).to(device))) for _ in range(2))
    cosines = one @ other.T
    same = cosines.diagonal().mean()
    return same.item(), ((cosines.sum() - cosines.trace()) / (cosines.numel() - len(cosines))).item()


world = npuzero.init()
mesh = npuzero.mesh()
torch.manual_seed(1)
model = npuzero.zero(Recognizer(mesh).to(world.device), plan=options.plan, mesh=mesh)
optimizer = npuzero.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
for step in range(options.steps):
    pictures, people = batch(step, world.rank, world.size)
    loss = model(pictures.to(world.device), people.to(world.device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == options.steps - 1:
        same, different = verify(model, world.device)
        if world.rank == 0:
            print(f"step {step}: loss {loss.item():.4f}, cosine of a person {same:.3f}, of two {different:.3f}")
head = model.head
if world.rank == 0:
    held = sum(npuzero.report(model).bytes_held.values())
    print(f"{head.local} of {head.classes} people on this rank, {held / 1e6:.1f} MB of training state")
