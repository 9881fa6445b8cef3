"""Run folders as a run would leave them, with numbers that are made up but plausible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quiverfl.results.run_files import finish_history, read_run
from quiverfl.results.summary import EvaluationProtocol, summarize
from quiverfl.seeds import stream


@dataclass(frozen=True)
class Recipe:
    """What a made-up run is like."""

    method: str = "dfedpgp"
    topology: Mapping[str, Any] = field(
        default_factory=lambda: {"name": "random_push", "neighbors": 3}
    )
    clients: int = 12
    classes: int = 10
    rounds: int = 15
    seed: int = 0
    level: float = 0.85
    """Where the accuracy ends."""
    drop: float = 0.08
    """How much lower it is right after communication."""
    model_bytes: int = 40_000
    moving_mass: bool = True
    finetune: str | None = None
    metrics: tuple[str, ...] = ("accuracy", "loss")


def write_run(folder: Path, recipe: Recipe | None = None, *, finished: bool = True) -> Path:
    """A whole run folder; unfinished ones have lines only, and no summary."""
    recipe = recipe or Recipe()
    folder.mkdir(parents=True)
    topology = dict(recipe.topology)
    if recipe.topology["name"] != "isolated":
        topology["seed"] = recipe.seed
    config = {"quiver": "0.1.0", "config": config_of(recipe), "topology": topology}
    write_json(folder / "config.json", config)
    write_json(folder / "environment.json", ENVIRONMENT)
    write_partition(folder / "partition.npz", recipe)
    write_lines(folder / "history.jsonl", history_lines(recipe))
    write_lines(folder / "rounds.jsonl", round_lines(recipe))
    if finished:
        finish_history(folder)
        write_summary(folder, recipe)
    return folder


def config_of(recipe: Recipe) -> dict[str, Any]:
    return {
        "data": {
            "name": "digits",
            "clients": recipe.clients,
            "partition": "dirichlet",
            "alpha": 0.3,
            "augment": "none",
            "seed": None,
            "options": {},
        },
        "model": {"name": "mlp", "personal": ["head"], "hidden": [64, 32]},
        "method": {"name": recipe.method},
        "topology": {"name": "auto"},
        "training": {
            "lr": 0.1,
            "personal_lr": 0.01,
            "lr_decay": 0.99,
            "momentum": 0.9,
            "weight_decay": 0.0005,
            "batch_size": 32,
            "clip_norm": None,
        },
        "run": {"rounds": recipe.rounds, "seed": recipe.seed, "evaluate_every": 1, "threads": 2},
        "overrides": {},
    }


def history_lines(recipe: Recipe) -> list[dict[str, Any]]:
    random = stream(recipe.seed, "made-up history", len(recipe.method), int(recipe.level * 1000))
    talent = random.normal(0, 0.07, recipe.clients)
    lines = []
    for round in range(recipe.rounds):
        for stage, drop in (("local", 0.0), ("mixed", recipe.drop)):
            rise = 1 - np.exp(-4 * (round + 1) / recipe.rounds)
            noise = random.normal(0, 0.015, recipe.clients)
            accuracy = np.clip((recipe.level - drop) * rise + talent + noise, 0, 1)
            values = {"accuracy": accuracy, "loss": 2.3 * (1.02 - accuracy)}
            metrics = {name: values[name].tolist() for name in recipe.metrics}
            lines.append({"round": round, "stage": stage, "metrics": metrics})
    return lines


def round_lines(recipe: Recipe) -> list[dict[str, Any]]:
    random = stream(recipe.seed, "made-up rounds")
    star, alone = recipe.topology["name"] == "star", recipe.method == "local"
    sampled = int(recipe.topology.get("sampled", recipe.clients)) if star else recipe.clients
    fan = 0 if alone else 1 if star else int(recipe.topology.get("neighbors", 2))
    lines = []
    for round in range(recipe.rounds):
        active = np.zeros(recipe.clients, dtype=int)
        active[random.permutation(recipe.clients)[:sampled]] = 1
        sent = active * fan * recipe.model_bytes
        moved = recipe.moving_mass and not alone and not star
        lines.append(
            {
                "round": round,
                "seconds": 0.5,
                "train_seconds": 0.3,
                "mix_seconds": 0.1,
                "evaluate_seconds": 0.1,
                "steps": (active * 30).tolist(),
                "sent_bytes": sent.tolist(),
                "received_bytes": sent.tolist(),
                "busiest_bytes": int(2 * sent.sum() if star else 2 * sent.max()),
                "network_bytes": int(2 * sent.sum() if star else sent.sum()),
                "mu_min": float(1 - 0.9 * (1 - np.exp(-round - 1))) if moved else 1.0,
                "mu_max": float(1 + 1.2 * (1 - np.exp(-round - 1))) if moved else 1.0,
                "consensus": None if alone else 0.0 if star else float(np.exp(-round / 5) + 0.05),
                "active": int(active.sum()),
            }
        )
    return lines


def write_partition(path: Path, recipe: Recipe) -> None:
    random = stream(recipe.seed, "made-up partition")
    shares = random.dirichlet(np.full(recipe.classes, 0.3), size=recipe.clients)
    train = np.round(shares * 60).astype(np.int64)
    np.savez(path, train_counts=train, test_counts=np.maximum(train // 5, 0))


def write_summary(folder: Path, recipe: Recipe) -> None:
    run = read_run(folder)
    write_json(
        folder / "summary.json",
        {
            "method": {"name": recipe.method, "epochs": 5},
            "topology": dict(recipe.topology),
            "clients": recipe.clients,
            "rounds": recipe.rounds,
            "protocol": EvaluationProtocol(finetune=recipe.finetune).record(),
            **summarize(run.history, run.rounds),
            "finished": True,
        },
    )


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


ENVIRONMENT = {
    "python": "3.11.9",
    "torch": "2.13.0",
    "numpy": "2.1.0",
    "quiverfl": "0.1.0",
    "platform": "Linux-6.1-x86_64",
    "cpu": "a made-up processor",
    "threads": 2,
}

STAR = {"name": "star", "sampled": 4}
ALONE = {"name": "isolated"}


def write_comparison(folder: Path, seeds: tuple[int, ...] = (0,), **changes: Any) -> Path:
    """DFedPGP, FedAvg and Local beside each other, for each seed."""
    for seed in seeds:
        for recipe in (
            Recipe(seed=seed, level=0.88 + 0.01 * seed, **changes),
            Recipe("fedavg", STAR, seed=seed, level=0.8, drop=0.25, **changes),
            Recipe("local", ALONE, seed=seed, level=0.72, drop=0.0, **changes),
        ):
            write_run(folder / f"{recipe.method}-{seed}", recipe)
    return folder


def write_exact(
    folder: Path, method: str, seed: int, local: list[list[float]], mixed: list[list[float]]
) -> None:
    """A run whose accuracies are given: a row per round, a column per client."""
    topology = ALONE if method == "local" else STAR
    clients = len(local[0])
    recipe = Recipe(method, topology, clients=clients, rounds=len(local), seed=seed, classes=2)
    write_run(folder, recipe, finished=False)
    np.savez(
        folder / "partition.npz",
        train_counts=np.ones((clients, 2), dtype=np.int64),
        test_counts=np.array([[3, 0], *[[1, 0]] * (clients - 1)]),
    )
    lines = [
        {"round": t, "stage": stage, "metrics": {"accuracy": row, "loss": [1 - a for a in row]}}
        for stage, table in (("local", local), ("mixed", mixed))
        for t, row in enumerate(table)
    ]
    write_lines(folder / "history.jsonl", lines)
    write_json(folder / "summary.json", {"finished": True, "protocol": {"stage": "local"}})
