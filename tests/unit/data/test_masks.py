"""Masks over random chats and every template of the five families: each speaker has an alphabet of its own, so a single
letter in the wrong place shows. Templates are those of the installed TRL, read from the package."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halo_core.data.examples import RowFault, example_of
from halo_core.data.spans import assistant_supervision
from halo_core.data.template import ChatTemplate, Conversation, chat_template_of
from halo_core.data.tokens import Tokens, tokens_of

TRL_TEMPLATES = Path(str(find_spec("trl").origin)).parent / "chat_templates"
STOCK = (
    "gptoss", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "lfm2", "lfm2_v2",
    "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5",
)  # fmt: skip
MARKED = (
    "gptoss_training", "qwen3_training", "qwen3_instruct_2507_training", "qwen3_5_think_training",
    "qwen3_5_nothink_training", "qwen3_6_training", "lfm2_training", "lfm2_v2_training", "lfm2_2_5", "lfm2_2_5_v2",
)  # fmt: skip
PAIRS = [(name, f"{name}_training") for name in STOCK if f"{name}_training" in MARKED]
TURN_ENDS = ("<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<turn|>", "<|tool_response>")
"""What closes a turn in these templates; a call of one family is closed by the token that opens the tool's answer."""

OTHERS = "абвгдежз"  # system, developer, user, tool, and what is said about the tools
EARLIER, LAST = "αβγδεζηθ", "აბგდევზთ"  # the assistant's earlier messages, and its last

Message = dict[str, Any]
Chat = tuple[list[Message], Any]


@pytest.fixture(scope="module")
def templates(trained_tokenizer: Any) -> dict[str, ChatTemplate]:
    """Return every template, each with a tokenizer of its own."""
    made: dict[str, ChatTemplate] = {}
    for name in (*STOCK, *MARKED):
        tokenizer = copy.deepcopy(trained_tokenizer)
        tokenizer.chat_template = (TRL_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        made[name] = chat_template_of(tokenizer, "row")
        assert made[name].has_markers == (name in MARKED), name
    return made


# --- random chats --------------------------------------------------------------------------------------------------

MARKERS = st.sampled_from(
    ["<|im_end|>", "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n", "assistant", "<|end|>", "<|start|>",
     "<|start|>assistant<|channel|>final<|message|>", "<turn|>", "<|turn>model\n", "<|tool_response>", "{% raw %}"]
)  # fmt: skip
TAGS = st.sampled_from(["<think>", "</think>", "<think>x</think>", "<|channel>thought\n", "<channel|>", "<tool_call>"])
SPACES = st.sampled_from(["", " ", "\n", "\n\n", "  \t", "🙂", "漢", "é", "e\u0301", "\u200b", "'", '"', "\\"])


def said(letters: str, *more: st.SearchStrategy[str], least: int = 1) -> st.SearchStrategy[str]:
    """Return texts of these letters among other pieces, with at least one letter unless `least` is 0."""
    words = st.text(alphabet=letters, min_size=least, max_size=4)
    pieces = st.lists(st.one_of(words, SPACES, *more), max_size=4)
    return st.tuples(pieces, words, pieces).map(lambda parts: "".join([*parts[0], parts[1], *parts[2]]))


@st.composite
def plain_chats(draw: st.DrawFn) -> Chat:
    """Chats as they should be: perhaps a system prompt, then question and answer in turn, some with reasoning."""
    count = draw(st.integers(1, 3))
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(said(OTHERS))})
    for number in range(count):
        letters = LAST if number == count - 1 else EARLIER
        messages.append({"role": "user", "content": draw(said(OTHERS, MARKERS))})
        answer = {"role": "assistant", "content": draw(said(letters))}
        if draw(st.booleans()):
            answer[draw(st.sampled_from(["reasoning_content", "thinking", "reasoning"]))] = draw(said(letters))
        messages.append(answer)
    return messages, None


@st.composite
def wild_chats(draw: st.DrawFn) -> Chat:
    """Chats in any order of roles, with tools, empty texts, and texts that look like the template's own."""
    roles = draw(
        st.lists(st.sampled_from(["user", "assistant", "call", "tool", "system", "developer"]), min_size=1, max_size=6)
    )
    last = max((place for place, role in enumerate(roles) if role in ("assistant", "call")), default=None)
    if last is None:
        roles, last = [*roles, "assistant"], len(roles)
    messages: list[Message] = []
    for place, role in enumerate(roles):
        letters = LAST if place == last else EARLIER
        if role not in ("assistant", "call"):
            messages.append({"role": role, "content": draw(said(OTHERS, MARKERS, TAGS, least=0))})
            continue
        message: Message = {
            "role": "assistant",
            "content": draw(said(letters, MARKERS, TAGS, least=int(role != "call"))),
        }
        if draw(st.booleans()):
            message["reasoning_content"] = draw(said(letters))
        if role == "call":
            arguments: Any = {"city": draw(said(letters))}
            arguments = json.dumps(arguments, ensure_ascii=False) if draw(st.booleans()) else arguments
            message["tool_calls"] = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
        messages.append(message)
    schema = {"type": "object", "properties": {"city": {"type": "string", "description": draw(said(OTHERS))}}}
    tool = {
        "type": "function",
        "function": {"name": "weather", "description": draw(said(OTHERS)), "parameters": schema},
    }
    return messages, draw(st.sampled_from([None, [tool], json.dumps([tool])]))


# --- what must hold ------------------------------------------------------------------------------------------------

REASONS = {
    "the chat template cannot render the row", "the assistant's text cannot be told from the rest",
    "the template leaves out tool calls", "the template breaks a reasoning block", "empty assistant message",
    "the template marks no assistant text",
}  # fmt: skip
"""Why a row that nobody would write may be refused."""

FAST = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def masked(template: ChatTemplate, chat: Chat, *, last_only: bool = False) -> Tokens:
    """Return the tokens of a chat, or raise why it is none."""
    example = example_of({"messages": chat[0], "tools": chat[1]})
    conversation = Conversation(messages=example.messages, tools=example.tools)
    found = assistant_supervision(template, conversation, last_only=last_only)
    made = tokens_of(template.tokenizer, [found.text], [found.spans], others=[found.others], add_special_tokens=False)
    if isinstance(made[0], RowFault):
        raise made[0]
    return made[0]


def runs(template: ChatTemplate, tokens: Tokens, wanted: bool = True) -> list[str]:
    """Return the decoded runs of tokens with this flag."""
    pieces: list[list[int]] = []
    before = False
    for token, flag in zip(tokens.input_ids, tokens.supervised, strict=True):
        if flag is wanted:
            pieces.append([] if not before else pieces.pop())
            pieces[-1].append(token)
        before = flag is wanted
    return [template.tokenizer.decode(piece) for piece in pieces]


def letters_in(texts: Sequence[str], alphabet: str) -> str:
    return "".join(letter for letter in "".join(texts) if letter in alphabet)


def check(name: str, template: ChatTemplate, chat: Chat, tokens: Tokens, *, last_only: bool = False) -> None:
    """Check one row: nobody else's letters are learnt, all of the assistant's are, and the ends of its turns are."""
    learnt, rest = runs(template, tokens), runs(template, tokens, wanted=False)
    whole = [template.tokenizer.decode(tokens.input_ids)]
    assert learnt, name
    assert not letters_in(learnt, OTHERS), (name, learnt)
    assert not letters_in(rest, LAST), (name, rest)
    assert letters_in(learnt, LAST) == letters_in(whole, LAST)
    assert not letters_in(learnt if last_only else rest, EARLIER), (name, learnt)
    for run in learnt:
        assert run.rstrip().endswith(TURN_ENDS), (name, learnt)


@FAST
@given(chat=plain_chats())
def test_plain_chats_are_learnt_under_every_template_to_the_letter(
    chat: Chat, templates: dict[str, ChatTemplate]
) -> None:
    for name, template in templates.items():
        tokens = masked(template, chat)
        check(name, template, chat, tokens)
        learnt = "".join(runs(template, tokens))
        answers = [message for message in chat[0] if message["role"] == "assistant"]
        given_letters = "".join(part for message in answers for key, part in message.items() if key != "role")
        for alphabet in (EARLIER, LAST):
            assert len(letters_in([learnt], alphabet)) <= len(letters_in([given_letters], alphabet)), "written twice"
        for message in answers:
            assert message["content"].strip() in learnt, name
        flagged = [token for token, flag in zip(tokens.input_ids, tokens.supervised, strict=True) if flag]
        ends = sum(token in TURN_ENDS for token in template.tokenizer.convert_ids_to_tokens(flagged))
        assert ends >= len(answers), name


@FAST
@given(chat=wild_chats())
def test_wild_chats_are_learnt_to_the_letter_or_refused_by_name(chat: Chat, templates: dict[str, ChatTemplate]) -> None:
    reasons: set[str] = set()
    for name, template in templates.items():
        try:
            tokens = masked(template, chat)
        except RowFault as refused:
            reasons.add(refused.reason)
            continue
        check(name, template, chat, tokens)
    assert reasons <= REASONS


@FAST
@given(chat=st.one_of(plain_chats(), wild_chats()))
def test_last_message_alone_is_learnt_where_asked(chat: Chat, templates: dict[str, ChatTemplate]) -> None:
    reasons: set[str] = set()
    for name, template in templates.items():
        try:
            tokens = masked(template, chat, last_only=True)
        except RowFault as refused:
            reasons.add(refused.reason)
            continue
        check(name, template, chat, tokens, last_only=True)
    assert reasons <= REASONS


@FAST
@given(chat=st.one_of(plain_chats(), wild_chats()))
def test_masks_of_templates_with_markers_are_those_of_transformers(
    chat: Chat, templates: dict[str, ChatTemplate]
) -> None:
    for name in MARKED:
        template = templates[name]
        try:
            tokens = masked(template, chat)
        except RowFault:
            continue
        example = example_of({"messages": chat[0], "tools": chat[1]})
        conversation, _ = template.fitted(Conversation(messages=example.messages, tools=example.tools))
        expected = template.tokenizer.apply_chat_template(
            list(conversation.messages),
            tools=conversation.tools and list(conversation.tools),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert tokens.input_ids == expected["input_ids"], name
        assert tokens.supervised == [flag == 1 for flag in expected["assistant_masks"]], name


@FAST
@given(chat=plain_chats())
def test_masks_told_from_renders_are_the_marked_ones_but_for_the_generation_prompt(
    chat: Chat, templates: dict[str, ChatTemplate]
) -> None:
    """Two templates of one model, one of them marked: where they write the same, they teach the same."""
    for stock, training in PAIRS:
        told, marked = masked(templates[stock], chat), masked(templates[training], chat)
        if told.input_ids != marked.input_ids:
            continue
        more = [there and not here for here, there in zip(told.supervised, marked.supervised, strict=True)]
        assert not any(here and not there for here, there in zip(told.supervised, marked.supervised, strict=True)), (
            stock
        )
        # Some markers take in what the generation prompt writes for the model; here that is not learnt.
        for run in runs(templates[stock], Tokens(input_ids=told.input_ids, supervised=more)):
            assert run in templates[stock].header, stock


def test_the_checks_see_a_mask_that_is_off_by_one_token(templates: dict[str, ChatTemplate]) -> None:
    chat: Chat = ([{"role": "user", "content": "абв"}, {"role": "assistant", "content": "აბგ"}], None)
    template = templates["qwen3"]
    tokens = masked(template, chat)
    check("qwen3", template, chat, tokens)
    first = tokens.supervised.index(True)
    spoken = next(p for p, t in enumerate(tokens.input_ids) if set(template.tokenizer.decode([t])) & set("აბგ\ufffd")
                  and p > first)  # fmt: skip
    user = next(p for p, t in enumerate(tokens.input_ids) if set(template.tokenizer.decode(tokens.input_ids[p:p + 2]))
                & set(OTHERS))  # fmt: skip
    end = len(tokens.input_ids) - 2
    for place, flags in ((user, [True, True]), (spoken, [False, False]), (end, [False, False])):
        wrong = [*tokens.supervised[:place], *flags, *tokens.supervised[place + 2 :]]
        with pytest.raises(AssertionError):
            check("qwen3", template, chat, Tokens(input_ids=tokens.input_ids, supervised=wrong))
