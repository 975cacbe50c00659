"""The toy model's training losses by plain torch in one process and one thread, as they once were.

python tests/golden/losses.py    writes toy_losses.json anew; say in the commit why the numbers moved
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from world.toy import build_seeded_model
from world.train import PlainSession, Session

FILE = Path(__file__).with_name("toy_losses.json")
STEPS, RANKS = 20, 2


def session_losses(session: Session) -> list[float]:
    """Loss of each step, mean over the ranks whose data the session sees."""
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-8, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        loss = session.loss(step % 4)
        loss.backward()
        session.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_golden_losses() -> list[float]:
    return session_losses(PlainSession(build_seeded_model(), range(RANKS), RANKS))


if __name__ == "__main__":
    torch.set_num_threads(1)
    FILE.write_text(json.dumps(plain_golden_losses(), indent=1) + "\n", encoding="utf-8")
