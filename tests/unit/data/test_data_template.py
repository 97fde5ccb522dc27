"""What is learnt of a conversation: exactly what the assistant writes, with the end of its turn, under any template."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halo_core.config import RunConfig
from halo_core.data import collate, pad_id_of, prepare
from halo_core.data.examples import RowFault
from halo_core.data.places import places_of
from halo_core.data.spans import assistant_supervision
from halo_core.data.template import Conversation, chat_template_of
from halo_core.data.verified import NOTE_NO_TURN_END, NOTE_REWRITTEN, NOTE_UNMARKED
from halo_core.errors import Refused

TRL_TEMPLATES = Path(str(find_spec("trl").origin)).parent / "chat_templates"
MARKED = sorted(path.stem for path in TRL_TEMPLATES.glob("*_training.jinja"))
# Their contents are lists of parts, never plain text; text alone is what is trained here.
PARTS_ONLY = ("idefics3_training", "llava_next_training", "smolvlm_training")

Message = dict[str, Any]
WithTemplate = Callable[[str], Any]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


PLAIN = [
    {"role": "system", "content": "Be brief."},
    user("How do I open a file?"),
    assistant("Call open."),
    user("And close it?"),
    assistant("Call close, or use with."),
]
NO_SYSTEM = PLAIN[1:]
REASONED = [
    user("First?"),
    assistant("One.", reasoning_content="It is the first number."),
    user("Second?"),
    assistant("Two.", reasoning_content="It follows the first."),
]
TAGGED = [
    user("First?"),
    assistant("<think>\nIt is the first number.\n</think>\n\nOne."),
    user("Second?"),
    assistant("<think>\nIt follows the first.\n</think>\n\nTwo."),
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOLS = [
    user("Weather in Oslo?"),
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "sunny and cold"},
    assistant("It is sunny."),
    user("Thanks."),
    assistant("Any time."),
]
ENDS_WITH_USER = [user("First?"), assistant("One."), user("Second?")]


def learnt(tokenizer: Any, messages: list[Message]) -> list[str]:
    """Return the pieces of text that are learnt: decoded runs of supervised tokens."""
    tokenizer_rows = prepare(RunConfig(), tokenizer, rows=[{"messages": messages}]).train
    return runs(tokenizer, tokenizer_rows[0].input_ids, tokenizer_rows[0].supervised)


def runs(tokenizer: Any, ids: Any, flags: Any) -> list[str]:
    """Return the decoded runs of flagged tokens."""
    pieces: list[list[int]] = []
    before = False
    for token, flag in zip(ids, flags, strict=True):
        if flag and not before:
            pieces.append([])
        if flag:
            pieces[-1].append(token)
        before = flag
    return [tokenizer.decode(piece) for piece in pieces]


# --- templates with generation markers: transformers' own masks are the independent answer -------------------------


@pytest.mark.parametrize("name", [name for name in MARKED if name not in PARTS_ONLY])
@pytest.mark.parametrize(
    "messages", [NO_SYSTEM, REASONED, TOOLS, ENDS_WITH_USER], ids=["plain", "reasoned", "tools", "user"]
)
def test_marked_template_gives_the_ids_and_mask_of_transformers(
    name: str, messages: list[Message], with_template: WithTemplate
) -> None:
    tokenizer = with_template(name)
    try:
        expected = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    except Exception:  # a template's refusal may be any error
        with pytest.raises(Refused, match="the chat template cannot render the row"):
            learnt(tokenizer, messages)
        return
    if messages is TOOLS and "weather" not in tokenizer.decode(expected["input_ids"]):
        with pytest.raises(Refused, match="leaves out tool calls: weather"):
            learnt(tokenizer, messages)
        return
    row = prepare(RunConfig(max_length=None), tokenizer, rows=[{"messages": messages}]).train[0]
    assert row.input_ids == expected["input_ids"]
    assert row.supervised == [flag == 1 for flag in expected["assistant_masks"]]
    assert 0 < row.num_targets < len(row.input_ids) - 1


# --- templates without markers: what the assistant writes, in the template's own words ------------------------------

STOCK: list[tuple[str, list[Message], list[str]]] = [
    ("lfm2", PLAIN, ["Call open.<|im_end|>\n", "Call close, or use with.<|im_end|>\n"]),
    ("lfm2", ENDS_WITH_USER, ["One.<|im_end|>\n"]),
    ("lfm2", [assistant("Ask me."), user("What?"), assistant("That.")], ["Ask me.<|im_end|>\n", "That.<|im_end|>\n"]),
    ("lfm2_v2", PLAIN, ["Call open.<|im_end|>\n", "Call close, or use with.<|im_end|>\n"]),
    (
        "gptoss",
        PLAIN,
        [
            "<|channel|>final<|message|>Call open.<|end|>",
            "<|channel|>final<|message|>Call close, or use with.<|return|>",
        ],
    ),
    (
        "gptoss",
        REASONED,
        [
            "<|channel|>final<|message|>One.<|end|>",
            "<|channel|>analysis<|message|>It follows the first.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Two.<|return|>",
        ],
    ),
    (
        "gptoss",
        TOOLS,
        [
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
            "<|channel|>final<|message|>It is sunny.<|end|>",
            "<|channel|>final<|message|>Any time.<|return|>",
        ],
    ),
    (
        "qwen3",
        PLAIN,
        ["Call open.<|im_end|>\n", "<think>\n\n</think>\n\nCall close, or use with.<|im_end|>\n"],
    ),
    ("qwen3", REASONED, ["One.<|im_end|>\n", "<think>\nIt follows the first.\n</think>\n\nTwo.<|im_end|>\n"]),
    ("qwen3", TAGGED, ["One.<|im_end|>\n", "<think>\nIt follows the first.\n</think>\n\nTwo.<|im_end|>\n"]),
    (
        "qwen3",
        TOOLS,
        [
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n',
            "It is sunny.<|im_end|>\n",
            "<think>\n\n</think>\n\nAny time.<|im_end|>\n",
        ],
    ),
    # The header's line end and the first one of the answer are one token.
    ("qwen3_5_think", PLAIN, ["Call open.<|im_end|>\n", "\n\n</think>\n\nCall close, or use with.<|im_end|>\n"]),
    ("qwen3_5_think", REASONED, ["One.<|im_end|>\n", "It follows the first.\n</think>\n\nTwo.<|im_end|>\n"]),
    ("qwen3_5_nothink", PLAIN, ["Call open.<|im_end|>\n", "Call close, or use with.<|im_end|>\n"]),
    ("qwen3_5_nothink", TAGGED, ["One.<|im_end|>\n", "It follows the first.\n</think>\n\nTwo.<|im_end|>\n"]),
    ("gemma4", PLAIN, ["Call open.<turn|>\n", "Call close, or use with.<turn|>\n"]),
    ("gemma4_v5", PLAIN, ["Call open.<turn|>\n", "Call close, or use with.<turn|>\n"]),
    (
        "gemma4_v5",
        REASONED,
        ["One.<turn|>\n", "<|channel>thought\nIt follows the first.\n<channel|>Two.<turn|>\n"],
    ),
    (
        "gemma4_v5",
        TOOLS,
        [
            '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_response>',
            "It is sunny.<turn|>\n",
            "Any time.<turn|>\n",
        ],
    ),
    ("gemma3", NO_SYSTEM, ["Call open.<end_of_turn>\n", "Call close, or use with.<end_of_turn>\n"]),
    ("llama3", PLAIN, ["Call open.<|eot_id|>", "Call close, or use with.<|eot_id|>"]),
    # Its last text ends with the end-of-text token, which no shorter render of it has in this place.
    ("phi3", PLAIN, ["Call open.<|end|>", "Call close, or use with.<|end|>\n<|endoftext|>"]),
]


@pytest.mark.parametrize(
    ("name", "messages", "expected"), STOCK, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(STOCK)]
)
def test_template_without_markers_learns_the_assistant_and_its_turn_end(
    name: str, messages: list[Message], expected: list[str], with_template: WithTemplate
) -> None:
    tokenizer = with_template(name)
    assert "generation %}" not in tokenizer.chat_template
    assert learnt(tokenizer, messages) == expected
    row = prepare(RunConfig(), tokenizer, rows=[{"messages": messages}]).train[0]
    assert row.input_ids == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]


@pytest.mark.parametrize("name", ["lfm2", "lfm2_v2", "llama3", "gemma3"])
def test_derived_mask_equals_the_marked_one_where_both_templates_write_the_same(
    name: str, with_template: WithTemplate
) -> None:
    derived = prepare(RunConfig(), with_template(name), rows=[{"messages": NO_SYSTEM}]).train[0]
    tokenizer = with_template(f"{name}_training")
    expected = tokenizer.apply_chat_template(NO_SYSTEM, return_dict=True, return_assistant_tokens_mask=True)
    assert derived.input_ids == expected["input_ids"]
    assert derived.supervised == [flag == 1 for flag in expected["assistant_masks"]]


CONTENTS = st.text(
    alphabet=st.one_of(
        st.sampled_from("ab \n.<|>/éß漢🙂"), st.characters(codec="utf-8", exclude_categories=["Cs", "Co"])
    ),
    max_size=12,
) | st.sampled_from(
    [
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "x<|im_end|>\n<|im_start|>user\nno",
        "assistant",
        "</think>",
        "<think>a</think>b",
    ]
)
CHATS = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), CONTENTS), min_size=1, max_size=6)


@given(chat=CHATS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much], deadline=None)
@pytest.mark.parametrize("name", ["lfm2", "lfm2_training"])
def test_random_chats_learn_each_character_of_the_assistant_and_none_of_another(
    name: str, chat: list[tuple[str, str]], with_template: WithTemplate
) -> None:
    """The format of this template is short enough to write down: that is the independent answer."""
    chat = [(role, f"{content}." if not content.strip() else content) for role, content in chat]
    messages = [{"role": role, "content": content} for role, content in chat]
    tokenizer = with_template(name)
    text, wanted = tokenizer.bos_token, [False] * len(tokenizer.bos_token)
    for role, content in chat:
        if role == "tool":
            content = f"<|tool_response_start|>{content}<|tool_response_end|>"
        header = f"<|im_start|>{role}\n"
        said = f"{content}<|im_end|>\n"
        text += header + said
        wanted += [False] * len(header) + [role == "assistant"] * len(said)
    if not any(role == "assistant" for role, _ in chat):
        with pytest.raises(Refused, match="no assistant message"):
            learnt(tokenizer, messages)
        return
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    row = prepare(RunConfig(max_length=None), tokenizer, rows=[{"messages": messages}]).train[0]
    assert row.input_ids == encoded["input_ids"]
    assert row.supervised == [any(wanted[start:end]) for start, end in encoded["offset_mapping"]]


@given(chat=CHATS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@pytest.mark.parametrize("name", ["qwen3", "gptoss", "gemma4_v5", "qwen3_5_think", "llama3", "phi3", "nemotron_3_nano"])
def test_random_chats_never_learn_what_another_says_under_any_template(
    name: str, chat: list[tuple[str, str]], with_template: WithTemplate
) -> None:
    """Others speak in letters that occur nowhere else, so a single learnt one shows; a refusal is no fault."""
    foreign = "".join(chr(0x0410 + offset) for offset in range(32))
    messages = [
        {"role": role, "content": content + "." if role == "assistant" else f"{content}{foreign[index]}"}
        for index, (role, content) in enumerate(chat)
    ]
    tokenizer = with_template(name)
    template = chat_template_of(tokenizer, "row")
    if not any(role == "assistant" for role, _ in chat):
        return  # refused before any template is asked
    try:
        supervision = assistant_supervision(template, Conversation(messages=tuple(messages)))
    except RowFault:
        return
    assert supervision.spans
    said = "".join(supervision.text[start:end] for start, end in supervision.spans)
    assert not set(said) & set(foreign)
    assert len(said) < len(supervision.text)


# --- what a template may do wrong ----------------------------------------------------------------------------------

HEADER = "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
PROMPT = "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"


def refusal(tokenizer: Any, messages: list[Message], **given: Any) -> str:
    """Return the text of the refusal."""
    with pytest.raises(Refused) as caught:
        prepare(RunConfig(**given), tokenizer, rows=[{"messages": messages}])
    return caught.value.text()


def test_markers_around_another_role_are_refused(with_template: WithTemplate) -> None:
    template = HEADER + "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n" + PROMPT
    text = refusal(with_template(template), NO_SYSTEM)
    assert "text of message 0 (user) would be learnt" in text
    assert "How do I open a file?" in text


def test_markers_that_mark_nothing_are_refused_with_the_rendered_text(with_template: WithTemplate) -> None:
    template = (
        HEADER + "{% if message.role == 'bot' %}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}<|im_end|>\n" + PROMPT
    )
    text = refusal(with_template(template), NO_SYSTEM)
    assert "generation markers mark nothing" in text
    assert "Call open.<|im_end|>" in text


def test_markers_that_leave_out_the_turn_end_are_followed_and_said(with_template: WithTemplate) -> None:
    template = (
        HEADER + "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}<|im_end|>\n" + PROMPT
    )
    tokenizer = with_template(template)
    prepared = prepare(RunConfig(), tokenizer, rows=[{"messages": NO_SYSTEM}])
    assert learnt(tokenizer, NO_SYSTEM) == ["Call open.", "Call close, or use with."]
    assert prepared.account.train.notes == {NOTE_NO_TURN_END: 1}
    assert "may not stop" in prepared.account.text()


def test_markers_around_the_last_turn_alone_are_followed_and_said(with_template: WithTemplate) -> None:
    template = (
        HEADER + "{% if message.role == 'assistant' and loop.last %}"
        "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ message.content }}<|im_end|>{% endif %}\n" + PROMPT
    )
    tokenizer = with_template(template)
    assert learnt(tokenizer, NO_SYSTEM) == ["Call close, or use with.<|im_end|>"]
    notes = prepare(RunConfig(), tokenizer, rows=[{"messages": NO_SYSTEM}]).account.train.notes
    assert notes == {NOTE_UNMARKED: 1}


def test_misspelt_marker_is_refused_with_its_line(with_template: WithTemplate) -> None:
    template = "{%- for message in messages -%}\n{% generaton %}{{ message.content }}{% endgeneration %}\n" + PROMPT
    text = refusal(with_template(template), NO_SYSTEM)
    assert "chat_template_path" in text
    assert "line 2" in text
    assert "generaton" in text


def test_template_that_drops_earlier_reasoning_is_learnt_as_rendered_and_said(with_template: WithTemplate) -> None:
    tokenizer = with_template("qwen3")
    for messages in (REASONED, TAGGED):
        prepared = prepare(RunConfig(), tokenizer, rows=[{"messages": messages}])
        assert prepared.account.train.notes == {NOTE_REWRITTEN: 1}
        text = "".join(runs(tokenizer, prepared.train[0].input_ids, prepared.train[0].supervised))
        assert "First?" not in text
        assert "Second?" not in text


def test_template_that_shuffles_turns_is_refused(with_template: WithTemplate) -> None:
    """It writes all questions before all answers, and the last answer first."""
    template = (
        "{%- for message in messages if message.role == 'assistant' -%}A: {{ message.content }}\n{%- endfor -%}"
        "{%- for message in messages if message.role != 'assistant' -%}Q: {{ message.content }}\n{%- endfor -%}"
    )
    text = refusal(with_template(template), NO_SYSTEM)
    assert "the assistant's text cannot be told from the rest" in text


def test_template_that_writes_one_text_for_everyone_never_learns_all_of_it(with_template: WithTemplate) -> None:
    template = "{%- for message in messages -%}{{ message.content }}{%- endfor -%}"
    tokenizer = with_template(template)
    assert learnt(tokenizer, [user("Question."), assistant("Answer")]) == ["Answer"]
    marked = "{% generation %}" + template + "{% endgeneration %}"
    assert "would be learnt" in refusal(with_template(marked), [user(""), user("q"), assistant("Answer")])
    assert "all of the row would be learnt" in refusal(with_template(marked), [user(""), assistant("Answer")])


def test_turn_whose_end_cannot_be_told_is_refused(with_template: WithTemplate) -> None:
    """A space follows a turn only where another turn does: nothing says whether it ends the one or opens the other."""
    template = (
        "{%- for message in messages -%}{{ message.role | upper }} {{ message.content }}"
        "{%- if not loop.last %} {% endif %}{%- endfor -%}{%- if add_generation_prompt %} ASSISTANT {% endif %}"
    )
    assert "where message 1 ends" in refusal(with_template(template), NO_SYSTEM)
    assert learnt(with_template(template), NO_SYSTEM[:2]) == [" Call open."]


def test_first_letter_of_an_answer_is_learnt_where_the_generation_prompt_opens_a_reasoning_block(
    with_template: WithTemplate,
) -> None:
    """`<think>`, which the generation prompt writes, and `<b>`, which the answer begins with, share a letter."""
    messages = [user("First?"), assistant("<b>One.</b>"), user("Second?"), assistant("Two.")]
    assert learnt(with_template("qwen3_5_think"), messages)[0] == "<b>One.</b><|im_end|>\n"


def test_place_of_a_content_is_exact_or_unknown() -> None:
    messages = [user("  one "), assistant("two"), user("")]

    def joined(given: tuple[Message, ...]) -> str:
        return "|".join(message["content"].strip() for message in given)

    def counted(given: tuple[Message, ...]) -> str:
        return "|".join(f"{len(message['content'])}{message['content']}" for message in given)

    def doubled(given: tuple[Message, ...]) -> str:
        return "|".join(message["content"] * 2 for message in given)

    def places(render: Callable[[tuple[Message, ...]], str]) -> list[tuple[int | None, int | None]]:
        return [(place.start, place.end) for place in places_of(messages, render(tuple(messages)), render)]

    assert places(joined) == [(0, 3), (4, 7), (None, None)]
    assert places(counted) == [(None, None)] * 3
    assert places(doubled) == [(None, None)] * 3


def test_field_without_a_value_is_a_field_that_is_not_there(with_template: WithTemplate) -> None:
    template = (
        HEADER + "{% if message.name is defined %}{{ message.name }}: {% endif %}{{ message.content }}<|im_end|>\n"
    )
    tokenizer = with_template(template + PROMPT)
    messages = [{**message, "name": None} for message in NO_SYSTEM]
    row = prepare(RunConfig(), tokenizer, rows=[{"messages": messages}]).train[0]
    assert row.input_ids == tokenizer.apply_chat_template(NO_SYSTEM, return_dict=True)["input_ids"]


def test_words_of_a_template_that_refuses_a_row_are_passed_on(with_template: WithTemplate) -> None:
    text = refusal(with_template("gemma"), PLAIN)
    assert "rows row 1: the chat template cannot render the row: System role not supported" in text


def test_content_with_the_closing_tag_alone_is_rendered_once(with_template: WithTemplate) -> None:
    orphan = [user("First?"), assistant("It is the first number.\n</think>\n\nOne.")]
    for name in ("qwen3", "qwen3_training", "qwen3_5_think", "qwen3_5_think_training", "qwen3_6_training"):
        tokenizer = with_template(name)
        row = prepare(RunConfig(), tokenizer, rows=[{"messages": orphan}]).train[0]
        text = tokenizer.decode(row.input_ids)
        assert text.count("It is the first number.") == 1, name
        assert (text.count("<think>"), text.count("</think>")) == (1, 1), name


@pytest.mark.parametrize("content", ["It is the first.</think>One.", "<think>It is the first.</think>One."])
def test_template_that_doubles_a_reasoning_block_is_refused(content: str, with_template: WithTemplate) -> None:
    template = (
        HEADER + "{% if message.role == 'assistant' %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ message.content }}<|im_end|>\n" + PROMPT
    )
    text = refusal(with_template(template), [user("First?"), assistant(content)])
    assert "the template breaks a reasoning block" in text
    assert "reasoning_content" in text
    kept = learnt(with_template(template), [user("First?"), assistant("One.", reasoning_content="It is the first.")])
    assert kept == ["<think>\nIt is the first.\n</think>\n\nOne.<|im_end|>"]


def test_tokenizer_without_template_is_refused_with_the_key(tokenizer: Any) -> None:
    text = refusal(tokenizer, NO_SYSTEM)
    assert "chat_template_path" in text
    assert "the tokenizer has no chat template" in text


def test_template_comes_from_a_file_or_from_a_tokenizers_folder(
    tokenizer: Any, tmp_path: Any, with_template: WithTemplate
) -> None:
    source = (TRL_TEMPLATES / "lfm2_training.jinja").read_text()
    (tmp_path / "chat.jinja").write_text(source)
    expected = ["Call open.<|im_end|>\n", "Call close, or use with.<|im_end|>\n"]
    config = RunConfig(chat_template_path=str(tmp_path / "chat.jinja"))
    row = prepare(config, tokenizer, rows=[{"messages": PLAIN}]).train[0]
    assert runs(tokenizer, row.input_ids, row.supervised) == expected
    assert tokenizer.chat_template == source
    tokenizer.save_pretrained(tmp_path / "folder")
    tokenizer.chat_template = None
    config = RunConfig(chat_template_path=str(tmp_path / "folder"))
    assert prepare(config, tokenizer, rows=[{"messages": PLAIN}]).train[0] == row


def test_template_whose_tokens_are_missing_and_wrong_paths_are_refused(tokenizer: Any, tmp_path: Any) -> None:
    other = _copy_with_token(tokenizer, "<|new_turn|>")
    other.chat_template = "{%- for message in messages -%}<|new_turn|>{{ message.content }}{%- endfor -%}"
    other.save_pretrained(tmp_path / "folder")
    assert "<|new_turn|>" in refusal(tokenizer, PLAIN, chat_template_path=str(tmp_path / "folder"))
    assert "no such file or folder" in refusal(tokenizer, PLAIN, chat_template_path="nowhere.jinja")
    assert "no tokenizer can be read" in refusal(tokenizer, PLAIN, chat_template_path="someone/tokenizer")
    (tmp_path / "empty").mkdir()
    assert "no tokenizer can be read" in refusal(tokenizer, PLAIN, chat_template_path=str(tmp_path / "empty"))


def _copy_with_token(tokenizer: Any, token: str) -> Any:
    other = copy.deepcopy(tokenizer)
    other.add_tokens([token])
    return other


def test_tools_and_variables_of_a_row_reach_the_template(with_template: WithTemplate) -> None:
    tokenizer = with_template("qwen3")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    for column in (tools, json.dumps(tools)):
        row = prepare(RunConfig(), tokenizer, rows=[{"messages": TOOLS, "tools": column}]).train[0]
        expected = tokenizer.apply_chat_template(TOOLS, tools=tools, return_dict=True)["input_ids"]
        assert row.input_ids == expected
    tokenizer = with_template(HEADER + "{{ mood }}: {{ message.content }}<|im_end|>\n" + PROMPT)
    row = prepare(
        RunConfig(), tokenizer, rows=[{"messages": NO_SYSTEM, "chat_template_kwargs": {"mood": "glad"}}]
    ).train[0]
    assert "glad: Call open." in tokenizer.decode(row.input_ids)


def test_date_in_the_template_is_said(with_template: WithTemplate) -> None:
    account = prepare(RunConfig(), with_template("gptoss"), rows=[{"messages": NO_SYSTEM}]).account
    assert "writes today's date" in account.text()


def test_pad_token_that_is_the_end_token_is_still_learnt_at_the_end_of_a_turn(with_template: WithTemplate) -> None:
    template = (
        HEADER
        + "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ message.content }}<|im_end|>{% endif %}" + PROMPT
    )
    tokenizer = with_template(template)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    rows = prepare(RunConfig(), tokenizer, rows=[{"messages": NO_SYSTEM}, {"messages": NO_SYSTEM[:2]}]).train
    batch = collate(rows, pad_id_of(tokenizer))
    assert pad_id_of(tokenizer) == tokenizer.eos_token_id
    for index, row in enumerate(rows):
        last = max(position for position in range(len(row.input_ids)) if row.supervised[position])
        assert row.input_ids[last] == tokenizer.eos_token_id
        assert batch.targets[index, last - 1] == tokenizer.eos_token_id
        ends = int((batch.targets[index] == tokenizer.eos_token_id).sum())
        assert ends == sum(message["role"] == "assistant" for message in (NO_SYSTEM, NO_SYSTEM[:2])[index])


def test_tokenizer_without_offsets_gives_the_same_tokens_or_refuses(
    with_template: WithTemplate, monkeypatch: Any
) -> None:
    tokenizer = with_template("qwen3")
    expected = list(prepare(RunConfig(), tokenizer, rows=[{"messages": TAGGED}]).train)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    assert list(prepare(RunConfig(), tokenizer, rows=[{"messages": TAGGED}]).train) == expected
    glued = with_template("{%- for message in messages -%}{{ message.content }}{%- endfor -%}")
    assert "a token joins two turns" in refusal(glued, [user("the funct"), assistant("ion is")])


def test_assistant_only_loss_false_learns_every_token_and_says_so(with_template: WithTemplate) -> None:
    prepared = prepare(RunConfig(assistant_only_loss=False), with_template("lfm2"), rows=[{"messages": NO_SYSTEM}])
    assert all(prepared.train[0].supervised)
    assert "every token (assistant_only_loss: false)" in prepared.account.text()


def test_question_that_a_template_writes_again_in_the_answer_is_never_learnt(with_template: WithTemplate) -> None:
    asked = "{% set asked = namespace(text='') %}"
    kept = "{% if message.role == 'user' %}{% set asked.text = message.content %}{% endif %}"
    answer = "{% if message.role == 'assistant' %}{% generation %}You asked: {{ asked.text }}\n{{ message.content }}"
    template = (
        asked + HEADER + kept + answer + "<|im_end|>{% endgeneration %}"
        "{% else %}{{ message.content }}<|im_end|>{% endif %}\n" + PROMPT
    )
    assert "text of message 0 (user) would be learnt" in refusal(with_template(template), NO_SYSTEM)


def test_others_content_whose_place_cannot_be_told_is_known_by_its_letters(with_template: WithTemplate) -> None:
    """This template looks at a content's length, so marks change what it writes, and no place is known."""
    template = (
        "{%- for message in messages -%}<|im_start|>{{ message.role }}{{ message.content | length }}\n"
        "{% if message.role == 'assistant' %}{% generation %}{{ messages[0].content }}\n{{ message.content }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}\n" + PROMPT
    )
    messages = [user("How do I open a file, and close it again?"), assistant("Call open.")]
    assert "text of message 0 (user) would be learnt" in refusal(with_template(template), messages)
