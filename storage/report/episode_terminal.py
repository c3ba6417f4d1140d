"""One attempt in a terminal: its facts, then turn by turn what it saw, what was sampled and what came of it.

What the model, the task and the sandbox wrote comes without escape sequences and is never read as markup.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from storage.printable import one_line, printable
from storage.report import words
from storage.report.episode import EpisodePart, UsePart
from storage.report.turns import TokenPart, TurnPart

LABEL = 16
DIGEST = 12


def render_episode(part: EpisodePart, console: Console, *, tokens: bool = False) -> None:
    """Print the attempt. `tokens`: with a table of every token."""
    console.print(Text(f"{part.attempt_id}", style="bold") + Text(f"  {part.kind}", style="dim"))
    for name, value in facts(part):
        _print(console, Text(f"{one_line(name):<{LABEL}} ", style="dim") + Text(one_line(value)))
    for note in part.notes:
        _print(console, Text(one_line(note), style="yellow"))
    for turn in part.turns:
        _turn(turn, console, tokens=tokens)


def facts(part: EpisodePart) -> list[tuple[str, str]]:
    """What is true of the whole attempt, as (name, value); for the page too."""
    ended = f"{words.plain(part.outcome)}: {words.plain(part.stop_reason)}" + (f", {part.why}" if part.why else "")
    spent = ", ".join(f"{name} {words.seconds(value)}" for name, value in part.seconds.items() if name != "all")
    rows = [
        ("task", part.task),
        ("asked", part.instruction),
        ("attempt", f"{part.attempt + 1} of {len(part.others) + 1}"),
        ("ended", ended),
        ("reward", words.reward(part.reward)),
        ("tampered", "yes: the verifier or its tests were touched" if part.tampered else ""),
        *((f"evidence: {name}", str(value)) for name, value in part.evidence.items()),
        ("made by version", words.versions(part.min_version, part.max_version)),
        ("tokens", f"{part.sampled_tokens} sampled, which is what trains, of {part.sequence_tokens}"),
        ("time", f"{words.seconds(part.seconds['all'])}: {spent}"),
        *(("trained", use_words(use)) for use in part.uses),
        ("trained", "" if part.uses else "no batch holds it"),
        ("in versions", words.versions(part.versions[0], part.versions[-1]) if part.versions else ""),
        ("checkpoint", part.checkpoint),
        ("sandbox", f"replayed into {part.replays} fresh ones" if part.replays else ""),
        ("sandbox image", part.image_id),
        ("seed", str(part.seed)),
        *(("other attempt", f"{attempt}: {ending}") for attempt, ending in part.others.items()),
        ("in the UI", part.ui),
    ]
    return [(name, value) for name, value in rows if value]


def use_words(use: UsePart) -> str:
    advantage = words.NONE if use.advantage is None else f"{use.advantage:+.3f}"
    again = f", once more with {use.group}" if use.replayed else ""
    why = f": {use.reason}" if use.reason else ""
    return f"{use.batch} (step {use.step}, {use.state}{why}), advantage {advantage}{again}"


def _turn(turn: TurnPart, console: Console, *, tokens: bool) -> None:
    console.print(Rule(Text(f"turn {turn.turn}"), align="left", style="dim"))
    _print(console, Text(sampled_words(turn)))
    if turn.missing:
        _print(console, Text(one_line(turn.missing), style="yellow"))
        _print(console, Text(f"  its action began: {one_line(turn.action)}"))
    _quoted(turn.before, "  │ ", "dim", console)
    _quoted(turn.text, "  ▌ ", "", console)
    if len(turn.spans) > 1:
        for span in turn.spans:
            place = f"tokens {span.first} to {span.first + span.tokens - 1}"
            _print(console, Text(f"  {place} by version {span.version}, logprob mean {span.logprob_mean:.2f}"))
    if gaps := gap_words(turn):
        _print(console, Text(f"  {gaps}", style="dim"))
    if tokens and turn.tokens:
        console.print(Padding(_tokens(turn.tokens), (0, 0, 0, 2)))
    failed = turn.exit_code not in (0, None) or turn.timed_out
    _print(console, Text(f"  {command_words(turn)}", style="red" if failed else ""))


def sampled_words(turn: TurnPart) -> str:
    """Example: `17 tokens by local-e0 at version 3 (stop), logprob mean -0.42, lowest -3.10; 96 of 123 prompt tokens
    from cache`."""
    logprobs = [token.logprob for token in turn.tokens if token.logprob is not None]
    numbers = f", logprob mean {sum(logprobs) / len(logprobs):.2f}, lowest {min(logprobs):.2f}" if logprobs else ""
    engine, ended = one_line(turn.engine or words.NONE), one_line(turn.finish_reason or "not ended")
    return (
        f"{turn.sampled_tokens} tokens by {engine} at version "
        f"{words.versions(turn.min_version, turn.max_version)} ({ended}){numbers}; "
        f"{turn.cached_tokens} of {turn.prompt_tokens} prompt tokens from cache"
    )


def gap_words(turn: TurnPart) -> str:
    """Example: `logprob gap to the trainer at version 3: mean 0.0004 nats, widest +0.0120 at token 17; the same
    weights, so numerics alone`. Empty where nobody kept what the trainer gave them."""
    gaps = [(token.gap, place) for place, token in enumerate(turn.tokens) if token.gap is not None]
    if not gaps:
        return ""
    widest, place = max(gaps, key=lambda found: abs(found[0]))
    mean = sum(abs(gap) for gap, _ in gaps) / len(gaps)
    same = all(token.version == turn.trainer_version for token in turn.tokens if token.sampled)
    cause = "the same weights, so numerics alone" if same else "other weights, so age and numerics"
    return (
        f"logprob gap to the trainer at version {turn.trainer_version}: mean {mean:.4f} nats, "
        f"widest {widest:+.4f} at token {place}; {cause}"
    )


def command_words(turn: TurnPart) -> str:
    """Example: `exit 0 after 1.5 s; generated in 2.1 s, waited 0.4 s`."""
    code = "ended by a signal" if turn.exit_code is None else f"exit {turn.exit_code}"
    ending = "timed out" if turn.timed_out else code
    digest = f", output {turn.output_digest[:DIGEST]}" if turn.output_digest else ""
    ran = f"{ending} after {words.seconds(turn.act_s)}{digest}" if turn.ran else "no command"
    return f"{ran}; generated in {words.seconds(turn.generate_s)}, waited {words.seconds(turn.queue_s)}"


def _quoted(text: str | None, mark: str, style: str, console: Console) -> None:
    for line in printable(text or "").splitlines():
        _print(console, Text(mark, style="dim") + Text(line, style=style))


def _print(console: Console, text: Text) -> None:
    """As long as it is: a narrow terminal folds the line itself, and nothing that is copied is cut."""
    console.print(text, soft_wrap=True)


def _tokens(tokens: list[TokenPart]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("token", "id", "text", "trains", "version", "logprob", "gap"):
        table.add_column(name, justify="left" if name == "text" else "right", overflow="fold")
    for place, token in enumerate(tokens):
        text = words.NONE if token.text is None else repr(printable(token.text))
        marks = (
            "yes" if token.sampled else "",
            words.count(token.version),
            words.nats(token.logprob),
            words.gap(token.gap),
        )
        table.add_row(str(place), str(token.id), Text(text), *marks)
    return table
