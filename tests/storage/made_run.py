"""A run made by hand: the rows that 15 steps of GRPO with eight groups of eight would leave, with some mishaps."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from sqlmodel import Session, SQLModel

from storage import evaluations, queries
from storage.tables import (
    Batch,
    BatchMember,
    EngineLoad,
    Episode,
    Evaluation,
    Group,
    PolicyVersion,
    Publication,
    Run,
    ServedEvaluation,
    Task,
    Turn,
)
from workflows.contracts import Fact, fingerprint_digest, settings_of

START = 1_790_000_000.0
KINDS = ("count", "find", "sort", "edit")
ENGINE_FACTS: dict[str, Fact] = {
    "engine": "vllm",
    "engine_version": "0.32.0",
    "device": "cpu, AVX2",
    "dtype": "float32",
    "quantization": "none",
    "kv_cache_dtype": "float32",
    "attention_backend": "CPU_ATTN",
    "prefix_caching": True,
    "max_model_len": 384,
}
OWN_FACTS: dict[str, Fact] = {"chat_template": "c0ffee", "taskset_digest": "7a5c", "temperature": 0.8, "top_p": 1.0}
CONFIG = {"model": "tiny", "taskset": "shell", "training": {"steps": 15}, "rollout": {"max_off_policy_steps": 1}}


@dataclass
class MadeRun:
    """Writes the rows. `state` and `reason` are the run's; `steps` of 15 are done. Without `mishaps` no group is lost
    and every load is proven."""

    opened: Session
    run: str = "shell-demo"
    steps: int = 15
    groups: int = 8
    siblings: int = 8
    state: str = "finished"
    reason: str = ""
    evaluations: bool = True
    mishaps: bool = True

    def __post_init__(self) -> None:
        self.random = random.Random(5)
        self.numbers = iter(range(10_000))
        self.later: list[SQLModel] = []
        """Rows whose episodes are not in the database yet."""

    def write(self) -> None:
        self.opened.add(
            Run(
                id=self.run,
                state=self.state,
                reason=self.reason,
                config=CONFIG,
                mode="async",
                seed=0,
                step=self.steps,
                policy_version=self.steps,
                started_at=START,
                ended_at=START + 60 + 21 * self.steps if self.state in ("finished", "failed") else None,
            )
        )
        for kind in KINDS:
            task = Task(id=f"shell/{kind}-1", taskset="shell", task_id=f"{kind}-1", split="train", kind=kind)
            queries.upsert(self.opened, task)
        self.opened.flush()
        self.publish(0)
        if self.evaluations:
            self.evaluate(0)
        for step in range(1, self.steps + 1):
            self.step(step)
        if self.evaluations and self.steps and self.state == "finished":
            self.evaluate(self.steps)
        self.opened.flush()

    def skill(self, step: int) -> float:
        return 0.22 + 0.62 / (1 + math.exp(-(step - 6) / 2))

    def step(self, step: int) -> None:
        batch, at = f"{self.run}/b{step}", START + 40 + 21 * step
        waited = {"to_trainable_batch": 14 + 3 * self.random.random() + (9 if step == 1 else 0)}
        parts = {"queue": 0.4, "boot": 0.2, "generate": 4.2, "act": 1.3 + self.random.random(), "verify": 0.5}
        parts |= {"other": 0.1, "wait_for_siblings": 3.1}
        parts["wait_for_batch"] = waited["to_trainable_batch"] - sum(parts.values())
        waited |= parts | {"median": 8.0, "tail": 2.5 + self.random.random()}
        last = parts | {"generate": parts["generate"] + 7.0, "wait_for_siblings": 0.0, "wait_for_batch": 0.0}
        last["act"] = waited["to_trainable_batch"] - sum(last.values()) + last["act"]
        closed_last = f"{self.run}/g{8 * step - 1}"
        lag = 0.0 if step == 1 else 0.55 + 0.3 * self.random.random()
        metrics = {
            "reward_mean": self.skill(step),
            "loss": 0.02 / step,
            "mismatch_kl/mean": 2e-5 * (1 + self.random.random()),
            "mismatch_kl/max": 3e-3,
            "mismatch_abs/far_share": 0.001,
            "off_policy/steps": lag,
            "off_policy/steps_max": min(1.0, step - 1.0),
            "off_policy/in_flight": lag * 0.2,
            "off_policy/in_pool": lag * 0.8,
            "off_policy/divergence": 4e-4 * (1 + lag),
            "off_policy/truncated_share": 0.002,
            "off_policy/effective_sample_size": 0.97,
            "finish_order/tokens_consumed": 34.0,
            "finish_order/tokens_admitted": 36.0 + step % 2,
            "finish_order/tokens_siblings": 34.0,
            "finish_order/reward_consumed": self.skill(step),
            "finish_order/reward_admitted": self.skill(step) + 0.02,
            "finish_order/reward_siblings": self.skill(step),
            "finish_order/open": float(step == 15),
            "entropy": 1.3 - 0.05 * step,
            "grad_norm": 0.8,
            "seconds/score": 1.1,
            "seconds/train": 3.3,
        }
        self.opened.add(
            Batch(
                id=batch,
                run=self.run,
                step=step,
                policy_version=step - 1,
                state="published",
                checkpoint=f"runs/{self.run}/checkpoints/{step}/manifest.json",
                metrics=metrics,
                waited=waited,
                tail={"group": closed_last, "attempt": f"{closed_last}/e3/a0", "parts": last},
                reserved_at=at,
                trained_at=at + 5,
            )
        )
        self.opened.flush()
        for position in range(self.groups):
            self.group(step, position, batch)
        if step % 4 == 0:
            self.dropped_group(step, "no_signal")
        if step % 7 == 0 and self.mishaps:
            self.lost_group(step)
        self.opened.flush()
        self.opened.add_all(self.later)
        self.opened.flush()
        self.later.clear()
        self.publish(step)
        if self.evaluations and step == 8:
            self.evaluate(step)

    def group(self, step: int, position: int, batch: str) -> None:
        group, at = f"{self.run}/g{next(self.numbers)}", START + 30 + 21 * step
        task = f"shell/{KINDS[position % 4]}-1"
        rewards = [float(self.random.random() < self.skill(step)) for _ in range(self.siblings)]
        rewards[0], rewards[1] = 1.0, 0.0
        mean = sum(rewards) / len(rewards)
        self.add_group(group, task, True, "", mean, at)
        for index, reward in enumerate(rewards):
            episode = self.episode(f"{group}/e{index}", group, task, reward, step, at)
            place = position * self.siblings + index
            advantage = (reward - mean) / 0.48
            self.later.append(
                BatchMember(episode=episode, batch=batch, group_id=group, position=place, advantage=advantage)
            )

    def dropped_group(self, step: int, reason: str) -> None:
        group, at = f"{self.run}/g{next(self.numbers)}", START + 30 + 21 * step
        self.add_group(group, "shell/sort-1", False, reason, 1.0, at)
        for index in range(self.siblings):
            self.episode(f"{group}/e{index}", group, "shell/sort-1", 1.0, step, at)

    def lost_group(self, step: int) -> None:
        group, at = f"{self.run}/g{next(self.numbers)}", START + 30 + 21 * step
        self.add_group(group, "shell/edit-1", False, "too_few_valid", None, at, replaced=3)
        for attempt in range(3):
            self.episode(f"{group}/e0", group, "shell/edit-1", None, step, at, attempt=attempt)

    def add_group(
        self, group: str, task: str, eligible: bool, reason: str, mean: float | None, at: float, replaced: int = 0
    ) -> None:
        self.opened.add(
            Group(
                id=group,
                run=self.run,
                task=task,
                number=int(group.rpartition("/g")[2]),
                eligible=eligible,
                reason=reason,
                mean_reward=mean,
                replaced=replaced,
                started_at=at - 14,
                closed_at=at,
            )
        )

    def episode(
        self,
        episode_id: str,
        group: str,
        task: str,
        reward: float | None,
        step: int,
        at: float,
        *,
        attempt: int = 0,
        kind: str = "train",
    ) -> str:
        """One attempt of two turns; without a reward its sandbox was lost."""
        outcome = "infra_failure" if reward is None else "model_success" if reward else "model_failure"
        ending = "sandbox_lost" if reward is None else "finished" if reward else "max_turns"
        version = max(0, step - 1 - int(self.random.random() < 0.5))
        made = Episode(
            id=f"{episode_id}/a{attempt}",
            episode_id=episode_id,
            group_id=group,
            run=self.run,
            kind=kind,
            task=task,
            attempt=attempt,
            outcome=outcome,
            stop_reason=ending,
            reward=reward,
            why="sandbox_lost: the daemon of host local went away" if reward is None else "",
            min_version=version,
            max_version=max(version, step - 1),
            sampled_tokens=34,
            sequence_tokens=180,
            queue_s=0.4,
            boot_s=0.6,
            generate_s=4.2,
            act_s=1.5,
            verify_s=0.5,
            started_at=at - 12,
            ended_at=at - self.random.random() * 8,
        )
        self.opened.add(made)
        for turn in range(2):
            self.later.append(
                Turn(
                    episode=made.id,
                    turn=turn,
                    segment=f"runs/{self.run}/segments/{made.id}/{turn}",
                    engine="local-e0",
                    prompt_tokens=100 + 60 * turn,
                    sampled_tokens=17,
                    cached_tokens=16 + 80 * turn,
                    min_version=version,
                    max_version=made.max_version or 0,
                    finish_reason="stop",
                    action="wc -l < notes.txt",
                    exit_code=0,
                    generate_s=2.1,
                )
            )
        return made.id

    def publish(self, version: int) -> None:
        at = START + 20 + 21 * version + 28
        self.opened.add(
            PolicyVersion(
                run=self.run,
                version=version,
                step=version,
                batch=f"{self.run}/b{version}" if version else None,
                checkpoint=f"runs/{self.run}/checkpoints/{version}/manifest.json",
                created_at=at,
            )
        )
        self.opened.add(
            Publication(
                run=self.run,
                version=version,
                manifest=f"runs/{self.run}/weights/{version}/manifest.json",
                digest=f"{version:02d}" * 32,
                bytes=5_242_880,
                seconds={"load": 0.01, "export": 0.12, "upload": 0.31, "canary": 0.05, "manifest": 0.02, "total": 0.51},
                published_at=at,
            )
        )
        for engine in ("local-e0", "local-e1"):
            broken = self.mishaps and version == 9 and engine == "local-e1"
            self.opened.add(
                EngineLoad(
                    run=self.run,
                    version=version,
                    engine=engine,
                    proven=not broken,
                    why="checksum of lm_head.weight differs" if broken else "",
                    pause_s=0.21,
                    seconds={"download": 0.1, "load": 0.2},
                    canary_max_abs=3e-6,
                    loaded_at=at + 1,
                )
            )

    def evaluate(self, version: int) -> None:
        mean = self.skill(version) - 0.03
        self.opened.add(
            Evaluation(
                run=self.run,
                version=version,
                episodes=48,
                mean_reward=mean,
                excluded=1,
                by_kind={
                    kind: min(1.0, mean + shift) for kind, shift in zip(KINDS, (0.1, -0.1, 0.05, -0.05), strict=True)
                },
                ended_at=START + 40 + 21 * version,
            )
        )
        self.measure(f"{self.run}/eval-v{version}", version, mean)

    def measure(self, evaluation_id: str, version: int, share: float, **changes: Fact) -> None:
        """A result of 48 tasks with one sample each on both engines, `changes` in its fingerprint."""
        in_run = evaluation_id.rpartition("/")[2].startswith("eval-v")
        at, passing = START + 35 + 21 * version + (0 if in_run else 600), round(48 * share)
        facts = ENGINE_FACTS | {name: value for name, value in changes.items() if name in ENGINE_FACTS}
        fields = {**facts, **OWN_FACTS, **changes, "weights": f"{version:02d}" * 8}
        tasks = {f"shell/{KINDS[number % 4]}-{500 + number}": int(number < passing) for number in range(48)}
        self.opened.add(
            ServedEvaluation(
                id=evaluation_id,
                run=self.run,
                version=version,
                workflow=evaluation_id,
                in_run=in_run,
                state="finished",
                taskset="shell",
                tasks=48,
                fields=fields,
                fingerprint=fingerprint_digest(fields),
                settings=fingerprint_digest(settings_of(fields)),
                engines={"local-e0": "d1", "local-e1": "d1"},
                scores={task: {"rewards": [float(passed)], "passed": passed} for task, passed in tasks.items()},
                excluded=1,
                started_at=at,
                ended_at=at + 5,
            )
        )
        for engine in ("local-e0", "local-e1"):
            evaluations.put_serving(
                self.opened, run=self.run, version=version, engine=engine, facts=facts, seen_at=at + 1
            )
