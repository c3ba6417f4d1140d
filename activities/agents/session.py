"""One attempt's side of an agent program: its calls to the policy and to its sandbox, within the run's budgets.

Owns the turns, the budgets and what ended the attempt. Promises: each answered call is stored as `generate` stores a
turn, under the same limits; a call that fails at the engine, the store or the sandbox is made again as long as an
activity would be, and then ends the attempt as that boundary's failure, never as an answer; a spent budget is told to
the program in an error that its client does not repeat. Called by the endpoint, for the activity that runs the program.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from activities.agents.chat import ApiError, ChatRequest, Completion, said_by
from activities.agents.conversation import Conversations, Place, TooLong
from activities.generation.activities import Answer, GenerationActivities
from activities.generation.transcript import Template
from workflows.attributes import shorten
from workflows.contracts import (
    ActInput,
    ActOutput,
    GenerateInput,
    RunAgentInput,
    Sampling,
    StopReason,
    TurnRecord,
    derive_seed,
)
from workflows.errors import InvalidConfig, RatchetError

Result = TypeVar("Result")
TRIES = 10
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
"""As long as an activity is tried again: this outlasts the restart of an engine, a store or a daemon."""
LOOK_EVERY_S = 0.1
MOST_OUTPUT = 16_000
"""Characters that are kept of what a program printed in the sandbox."""
ACTION_BYTES = 80
"""What a turn's row keeps of its action: the rows of a hundred turns go into one message."""
LONGEST_COMMAND = 100_000
"""Bytes; Linux passes no longer argument."""
TOO_LONG = f"sh: Argument list too long: a command has {LONGEST_COMMAND} bytes at most, write more than that in parts\n"


@dataclass(frozen=True)
class Spent:
    """A budget that is spent, or a context that is full."""

    reason: StopReason
    why: str

    @property
    def error(self) -> ApiError:
        if self.reason is StopReason.CONTEXT_FULL:
            return ApiError(400, self.why, code="context_length_exceeded")
        return ApiError(403, self.why, code=self.reason.value, type="insufficient_quota")


class AgentSession:
    """`act` runs a command in the attempt's sandbox, once per op_id whoever asks again."""

    def __init__(
        self,
        message: RunAgentInput,
        template: Template,
        generation: GenerationActivities,
        act: Callable[[ActInput], Awaitable[ActOutput]],
    ) -> None:
        self._message, self._limits = message, message.limits
        self._template, self._generation, self._act = template, generation, act
        self._conversations = Conversations(template)
        self._begun = 0
        self._reserved = 0
        """Tokens that calls under way may sample."""
        self._commands = 0
        self._inside = 0
        self._inside_since = 0.0
        self._inside_s = 0.0
        self.records: dict[int, TurnRecord] = {}
        """By turn, the calls that were answered."""
        self.sampled_tokens = 0
        self.sequence_tokens = 0
        self.command_s = 0.0
        self.queue_s = 0.0
        self.evidence: dict[str, str] = {}
        self.last_text = ""
        """What the policy said last."""
        self.spent: Spent | None = None
        """What the program was refused for; a full context only until something shorter was answered."""
        self.ended: Spent | None = None
        """What the agent did that ends the attempt at once."""
        self.broken: RatchetError | None = None
        """What infrastructure did that ends the attempt at once."""
        self.changed = asyncio.Event()
        """Set when one of the three above was."""

    @property
    def turns(self) -> list[TurnRecord]:
        return [self.records[turn] for turn in sorted(self.records)]

    @property
    def waited_s(self) -> float:
        """Seconds in which at least one call of the program was here: not its own."""
        now = time.monotonic() - self._inside_since if self._inside else 0.0
        return self._inside_s + now

    # --- the policy -----------------------------------------------------------------------------------------------

    async def chat(self, request: ChatRequest) -> Completion:
        """One answer of the policy. Raises ApiError."""
        conversation = request.conversation()
        most = await self._room_for(request)
        turn, self._begun, self._reserved = self._begun, self._begun + 1, self._reserved + most
        began = time.monotonic()
        self._enter()
        try:
            most_tokens = self._limits.context_length
            with self._conversations.place(conversation, request.tools, request.stop, most_tokens=most_tokens) as place:
                answer = await self._surviving(lambda attempt: self._answer(place, turn, most, attempt))
                if answer is None:
                    self._take_back(turn)
                    raise self._refuse(self._context_full(f"{len(place.prompt.token_ids)} tokens"))
                return self._completed(request, place, turn, answer, time.monotonic() - began)
        except TooLong as error:
            self._take_back(turn)
            raise self._refuse(self._context_full(f"{error.chars} characters")) from error
        except InvalidConfig as error:
            # What the template refuses was the program's: another conversation may fit.
            self._take_back(turn)
            raise ApiError(400, str(error), code="invalid_request") from error
        finally:
            self._reserved -= most
            self._leave()

    def _take_back(self, turn: int) -> None:
        """Nothing was sampled in it."""
        if turn == self._begun - 1:
            self._begun = turn

    async def _answer(self, place: Place, turn: int, most: int, attempt: int) -> Answer | None:
        message, limits = self._message, self._limits
        asked = GenerateInput(
            run=message.run,
            attempt_id=message.attempt_id,
            session=message.attempt_id,
            turn=turn,
            model=message.model,
            task=message.task,
            sampling=Sampling(
                temperature=limits.temperature,
                max_tokens=most,
                context_length=limits.context_length,
                top_p=limits.top_p,
                top_k=limits.top_k,
                min_p=limits.min_p,
            ),
            seed=derive_seed(message.seed, turn),
            priority=message.priority,
            started_at=message.started_at,
            kv=limits.kv,
            pinned_version=message.pinned_version,
            timeout_s=limits.generate_timeout_s,
        )
        return await self._generation.answer(asked, place.prompt, self._template, attempt=attempt)

    def _completed(self, request: ChatRequest, place: Place, turn: int, answer: Answer, seconds: float) -> Completion:
        segment = answer.segment
        offered = bool(request.tools) and request.tool_choice != "none"
        syntax = self._template.call_syntax if offered else None
        said, finish = said_by(segment.text, turn, segment.finish_reason, syntax=syntax, stop=request.stop)
        self._conversations.answered(place, segment, said)
        self.sampled_tokens += answer.sampled_tokens
        self.sequence_tokens = max(self.sequence_tokens, answer.prompt_tokens + answer.sampled_tokens)
        self.queue_s += answer.waited_s
        self.last_text = segment.text
        if self.spent is not None and self.spent.reason is StopReason.CONTEXT_FULL:
            # It went on with a shorter conversation.
            self.spent = None
        self.records[turn] = TurnRecord(
            turn=turn,
            segment=answer.key,
            engine=segment.engine,
            prompt_tokens=answer.prompt_tokens,
            sampled_tokens=answer.sampled_tokens,
            cached_tokens=segment.cached_tokens,
            min_version=min(answer.versions),
            max_version=max(answer.versions),
            asked_at=answer.asked_at,
            finish_reason=segment.finish_reason,
            action=shorten(segment.text, ACTION_BYTES),
            generate_s=seconds - answer.waited_s,
            queue_s=answer.waited_s,
        )
        return Completion(
            turn=turn,
            said=said,
            finish=finish,
            prompt_tokens=answer.prompt_tokens,
            sampled_tokens=answer.sampled_tokens,
            cached_tokens=segment.cached_tokens,
        )

    async def _room_for(self, request: ChatRequest) -> int:
        """Tokens that the call may sample; what others under way may need is waited for. Raises ApiError where a budget
        is spent."""
        limits = self._limits
        while (left := limits.max_tokens - self.sampled_tokens - self._reserved) <= 0 < self._reserved:
            await asyncio.sleep(LOOK_EVERY_S)
        self._check_open()
        if self._begun >= limits.max_turns:
            raise self._refuse(Spent(StopReason.MAX_TURNS, f"{limits.max_turns} turns are spent (rollout.max_turns)"))
        if left <= 0:
            why = f"{limits.max_tokens} sampled tokens are spent (rollout.max_tokens)"
            raise self._refuse(Spent(StopReason.MAX_TOKENS, why))
        return min(left, limits.max_tokens_per_turn, request.most_tokens or left)

    def _context_full(self, asked: str) -> Spent:
        longest = self._limits.context_length
        return Spent(
            StopReason.CONTEXT_FULL,
            f"This model's maximum context length is {longest} tokens. However, your messages resulted in {asked}"
            " (rollout.context_length).",
        )

    def _refuse(self, spent: Spent) -> ApiError:
        self.spent = spent
        self.changed.set()
        return spent.error

    def _check_open(self) -> None:
        """Raises ApiError once the attempt is over."""
        if self.broken is not None:
            raise ApiError(503, f"the episode is over: {self.broken}", code="episode_over", type="server_error")
        if self.ended is not None:
            raise self.ended.error

    # --- the sandbox ----------------------------------------------------------------------------------------------

    async def run(self, command: str, timeout_s: float | None) -> ActOutput:
        """Run a command in the sandbox, for `timeout_s` at most. Raises ApiError."""
        if not command.strip() or "\0" in command:
            raise ApiError(400, "a command must not be empty or hold a NUL byte", code="invalid_request")
        self._check_open()
        if len(command.encode("utf-8", "replace")) > LONGEST_COMMAND:
            return ActOutput(exit_code=126, output=TOO_LONG)
        limits = self._limits
        own = min(limits.step_timeout_s, timeout_s or limits.step_timeout_s)
        granted = min(own, limits.time_budget_s - self.command_s)
        self._commands += 1
        message = ActInput(
            lease=self._message.lease,
            op_id=f"x{self._commands}",
            turn=max(self.records, default=0),
            command=command,
            step_timeout_s=max(granted, 0.1),
            max_output_chars=limits.max_output_chars,
        )
        self._enter()
        try:
            out = await self._surviving(lambda attempt: self._act(message))
        finally:
            self._leave()
        self._acted(message, out)
        if out.sandbox_broken:
            self._end(Spent(StopReason.SANDBOX_KILLED_BY_AGENT, out.sandbox_broken))
        elif self.command_s >= limits.time_budget_s or (out.timed_out and granted < own):
            self._end(Spent(StopReason.TIME_BUDGET, f"its commands ran {self.command_s:.1f} s"))
        return out

    async def play(self, command: str, timeout_s: float, op_id: str) -> ActOutput | None:
        """Run the program itself, or what it left, in the sandbox; None where that broke the attempt."""
        message = ActInput(
            lease=self._message.lease,
            op_id=op_id,
            turn=0,
            command=command,
            step_timeout_s=timeout_s,
            max_output_chars=MOST_OUTPUT,
        )
        try:
            out = await self._surviving(lambda attempt: self._act(message))
        except ApiError:
            return None
        self.evidence = out.evidence or self.evidence
        if out.sandbox_broken:
            self._end(Spent(StopReason.SANDBOX_KILLED_BY_AGENT, out.sandbox_broken))
        return out

    def _acted(self, message: ActInput, out: ActOutput) -> None:
        """What the turn's row tells: its last command, and the time of all."""
        self.command_s += out.command_s
        self.queue_s += out.timing.queue_s
        self.evidence = out.evidence
        if (record := self.records.get(message.turn)) is None:
            return
        self.records[message.turn] = record.model_copy(
            update={
                "action": shorten(message.command, ACTION_BYTES),
                "exit_code": out.exit_code,
                "timed_out": out.timed_out,
                "output_digest": out.output_digest,
                "act_s": record.act_s + out.timing.run_s,
            }
        )

    def _end(self, spent: Spent) -> None:
        self.ended = spent
        self.changed.set()

    # --- both -----------------------------------------------------------------------------------------------------

    async def _surviving(self, call: Callable[[int], Awaitable[Result]]) -> Result:
        """`call` with the number of its try, until it works. Raises ApiError once the attempt is broken."""
        pause_s, attempt = FIRST_PAUSE_S, 1
        while True:
            try:
                return await call(attempt)
            except InvalidConfig:
                raise
            except RatchetError as error:
                if not error.retryable or attempt == TRIES or self.broken is not None:
                    self.broken = self.broken or error
                    self.changed.set()
                    raise ApiError(503, str(error), code="episode_over", type="server_error") from error
            attempt += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _enter(self) -> None:
        if not self._inside:
            self._inside_since = time.monotonic()
        self._inside += 1

    def _leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._inside_s += time.monotonic() - self._inside_since
