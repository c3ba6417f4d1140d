from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from activities.generation.transcript import Template
from tests.generation.policies import CHATML, THINKING, TINY, make_tokenizer
from workflows.errors import InvalidConfig

CONVERSATION = [{"role": "system", "content": "Use the shell."}, {"role": "user", "content": "How many cats?"}]
SEEN = {"role": "user", "content": "cat: 3"}


def rendered(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize(
    ("chat", "eos"),
    [(CHATML, "<|im_end|>"), (CHATML, "<|endoftext|>"), (TINY, "<|end|>")],
    ids=["chatml", "eos", "tiny"],
)
def test_incremental_ids_are_those_of_the_whole_conversation_rendered_at_once(chat: str, eos: str) -> None:
    tokenizer = make_tokenizer(chat, eos=eos)
    template = Template(tokenizer)
    sampled = [*tokenizer.encode("cat log", add_special_tokens=False), template.end_of_turn]
    ids = template.initial(CONVERSATION) + sampled + template.continuation(sampled[-1], SEEN)
    assert ids == rendered(tokenizer, [*CONVERSATION, {"role": "assistant", "content": "cat log"}, SEEN])


@pytest.mark.parametrize("chat", [CHATML, TINY], ids=["chatml", "tiny"])
def test_an_answer_cut_short_gets_the_templates_own_end_of_turn(chat: str) -> None:
    tokenizer = make_tokenizer(chat, eos="<|im_end|>")
    template = Template(tokenizer)
    sampled = tokenizer.encode("cat lo", add_special_tokens=False)
    ids = template.initial(CONVERSATION) + sampled + template.continuation(sampled[-1], SEEN)
    assert ids == rendered(tokenizer, [*CONVERSATION, {"role": "assistant", "content": "cat lo"}, SEEN])


def test_an_answer_that_ends_with_another_eos_keeps_it_and_is_closed_by_the_template() -> None:
    tokenizer = make_tokenizer(CHATML, eos="<|endoftext|>")
    template = Template(tokenizer)
    assert template.end_of_turn == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert template.continuation(tokenizer.eos_token_id, SEEN)[0] == template.end_of_turn


def test_the_newline_after_the_end_of_a_turn_is_the_templates_and_not_lost() -> None:
    tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
    template = Template(tokenizer)
    assert tokenizer.decode(template.continuation(template.end_of_turn, SEEN)) == (
        "\n<|im_start|>user\ncat: 3<|im_end|>\n<|im_start|>assistant\n"
    )


def test_sampled_ids_are_kept_where_encoding_their_text_gives_others() -> None:
    tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
    template = Template(tokenizer)
    spelt = [tokenizer.convert_tokens_to_ids(letter) for letter in "cat"]
    assert template.text(spelt) == "cat"
    assert tokenizer.encode("cat", add_special_tokens=False) != spelt


def test_ids_that_split_a_character_are_text_for_people_only() -> None:
    tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
    euro = tokenizer.encode("€", add_special_tokens=False)
    assert len(euro) == 3
    assert Template(tokenizer).text(euro[:2]) == "\N{REPLACEMENT CHARACTER}"


def test_a_template_that_rewrites_history_changes_no_earlier_id() -> None:
    tokenizer = make_tokenizer(THINKING, eos="<|im_end|>")
    template = Template(tokenizer)
    first = template.initial(CONVERSATION)
    thought = [*tokenizer.encode("hm</think>cat log", add_special_tokens=False), template.end_of_turn]
    following = template.continuation(thought[-1], SEEN)
    whole = rendered(tokenizer, [*CONVERSATION, {"role": "assistant", "content": "hm</think>cat log"}, SEEN])
    assert whole[: len(first) + len(thought)] != first + thought
    assert whole[-len(following) :] == following


def test_text_of_an_answer_holds_no_special_token() -> None:
    tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
    template = Template(tokenizer)
    ids = [*tokenizer.encode("Answer:  3 ", add_special_tokens=False), template.end_of_turn]
    assert template.text(ids) == "Answer:  3 "


def test_bos_comes_once_where_template_and_tokenizer_both_write_it() -> None:
    tokenizer = make_tokenizer(THINKING, eos="<|im_end|>", adds_bos=True)
    assert Template(tokenizer).initial(CONVERSATION).count(tokenizer.bos_token_id) == 1


def test_a_template_that_writes_bos_twice_is_refused() -> None:
    tokenizer = make_tokenizer("{{ bos_token }}" + THINKING, eos="<|im_end|>")
    with pytest.raises(InvalidConfig, match="BOS"):
        Template(tokenizer).initial(CONVERSATION)


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    plain = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
    with pytest.raises(InvalidConfig, match="special token"):
        Template(make_tokenizer(plain, eos="<|im_end|>"))


def test_a_worker_that_only_generates_does_not_load_torch(tmp_path: Path) -> None:
    make_tokenizer(CHATML, eos="<|im_end|>").save_pretrained(tmp_path)
    program = (
        "import sys; from activities.generation.activities import Template;"
        f"Template.load({str(tmp_path)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
