"""Rows with completions and conversations: what is learned of them, by transformers' own rendering of templates."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchwright.errors import SpecError
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.base import TrainingData
from batchwright.training.data.sources.chat_template import Chat, ChatTemplate
from batchwright.workloads.base import IGNORED_LABEL
from batchwright.workloads.build import build_model, build_workload
from tests.support.factories import gpt_spec
from tests.support.sources import built, problem
from tests.training.data.test_data import write_rows
from tests.training.test_adapters import LLAMA
from tests.training.test_trained_model import spec_of

pytestmark = pytest.mark.usefixtures("own_datasets_cache")

LENGTH = 120
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, with the answers marked."""
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
"""As of Llama 2: a space before the special token behind an answer."""
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n"
    "</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] }}<|im_end|>{{ '\n' }}{% endfor %}"
)
"""As of Qwen 3: earlier answers are without thoughts, so that the text of a part is not the beginning of the whole."""
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4, é"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Bytes, and special tokens, in a folder of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:240]
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    (tmp_path / "tokenizer").mkdir()
    path = tmp_path / "tokenizer/tokenizer.json"
    made.save(str(path))
    return path


def rows_spec(
    directory: Path, rows: list[dict[str, Any]], *, batch: dict[str, Any] | None = None, **fields: Any
) -> WorkloadSpec:
    """A small Llama on these rows."""
    data = {"kind": "records", "paths": [str(write_rows(directory / "rows.jsonl", rows))], **fields}
    return spec_of(
        {"config": {**LLAMA, "vocab_size": 512}}, batch={"sequence_length": LENGTH, **(batch or {})}, data=data
    )


def published(name: str) -> str:
    """A chat template as its authors published it, of the copies in TRL, which only the extra `bench` has."""
    pytest.importorskip("trl")
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text()


def add_special_tokens(tokenizer: Path, template: str) -> None:
    """Give a tokenizer the special tokens that a template writes, and all bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer.from_file(str(tokenizer))
    made.model = models.BPE({letter: place for place, letter in enumerate(alphabet)}, [])
    names = {*SPECIAL, *re.findall(r"<\|\w+\|?>|<\w+\|>|<\uff5c[^\uff5c]+\uff5c>|<\w+_of_turn>", template)}
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in sorted(names)])
    made.save(str(tokenizer))


def chat_data(
    tokenizer: Path,
    template: str,
    chats: list[list[dict[str, Any]]],
    *,
    batch: dict[str, Any] | None = None,
    **fields: Any,
) -> TrainingData:
    """Conversations, with a template beside the tokenizer."""
    (tokenizer.parent / "chat_template.jinja").write_text(template)
    (tokenizer.parent / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "added_tokens_decoder": {}})
    )
    rows = [{"messages": chat} for chat in chats]
    settings = {"tokenizer": str(tokenizer), "messages_field": "messages", **fields}
    return built(rows_spec(tokenizer.parent, rows, batch=batch, **settings))


def learned_texts(data: TrainingData, tokenizer: Path, index: int = 0) -> list[str]:
    """The texts of the tokens that are learned, in runs."""
    sample: dict[str, torch.Tensor] = data.samples[index]
    decode = Tokenizer.from_file(str(tokenizer)).decode
    found: list[list[int]] = [[]]
    for number, label in zip(sample["input_ids"].tolist(), sample["labels"].tolist(), strict=True):
        assert label in {number, IGNORED_LABEL}
        if label == IGNORED_LABEL:
            found.append([])
        else:
            found[-1].append(number)
    return [decode(run, skip_special_tokens=False) for run in found if run]


# --- conversations ---


def test_tokens_and_answers_are_those_of_transformers(tokenizer: Path) -> None:
    """With answers that the template marks, and with those of the same template without marks."""
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer)).apply_chat_template(
        CHAT, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    wanted = [
        number if learned else IGNORED_LABEL
        for number, learned in zip(oracle["input_ids"], oracle["assistant_masks"], strict=True)
    ]
    assert 0 < sum(label != IGNORED_LABEL for label in wanted) < len(wanted) / 2
    for template in (MARKED, PLAIN):
        data = chat_data(tokenizer, template, [CHAT])
        sample: dict[str, torch.Tensor] = data.samples[0]
        assert sample["input_ids"].tolist() == oracle["input_ids"]
        assert sample["labels"].tolist() == wanted
        assert not data.notes
        assert data.lengths is not None
        assert data.lengths.tolist() == [len(wanted)]


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (PLAIN, ["4, é<|im_end|>", "yes<|im_end|>"]),
        (THINKING, ["4, é<|im_end|>", "yes<|im_end|>"]),
        (INSTRUCTIONS, ["4, é", "</s>", "yes", "</s>"]),
    ],
)
def test_every_answer_is_learned_with_the_special_token_behind_it(
    tokenizer: Path, template: str, learned: list[str]
) -> None:
    """Also where an answer that is not the last one is written otherwise than alone, and where space is behind it."""
    chat = CHAT if template != INSTRUCTIONS else CHAT[1:]
    assert learned_texts(chat_data(tokenizer, template, [chat]), tokenizer) == learned


@pytest.mark.parametrize(
    ("name", "learned"),
    [
        ("qwen2_5", ["4, é<|im_end|>", "yes<|im_end|>"]),
        ("qwen3", ["4, é<|im_end|>", "<think>\n\n</think>\n\nyes<|im_end|>"]),
        ("llama3", ["4, é<|eot_id|>", "yes<|eot_id|>"]),
        ("cohere2", [f"{word}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>" for word in ("4, é", "yes")]),
        ("gptoss", [f"<|channel|>final<|message|>{word}" for word in ("4, é<|end|>", "yes<|return|>")]),
        ("phi3", ["4, é<|end|>", "yes<|end|>\n</s>"]),
        ("glm4moe", ["\n<think></think>\n4, é<|user|>", "\n<think></think>\nyes"]),
        ("deepseekv3", ["4, é<\uff5cend▁of▁sentence\uff5c>", "yes<\uff5cend▁of▁sentence\uff5c>"]),
    ],
)
def test_answers_of_published_templates_are_all_that_the_assistant_writes(
    tokenizer: Path, name: str, learned: list[str]
) -> None:
    """From the end of the generation prompt to the end of the turn."""
    source = published(name)
    add_special_tokens(tokenizer, source)
    assert learned_texts(chat_data(tokenizer, source, [CHAT], batch={"sequence_length": 2000}), tokenizer) == learned


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_8", "lfm2", "gemma3", "cohere2"])
def test_answers_of_published_templates_are_those_of_trl(tokenizer: Path, name: str) -> None:
    """Whose copy of a template has marks: thoughts are learned from where the model would begin to write them."""
    source, marked = published(name), published(f"{name}_training")
    add_special_tokens(tokenizer, source)
    chat = [CHAT[1], {"role": "assistant", "content": "4", "reasoning_content": "so"}]
    learned = [
        learned_texts(chat_data(tokenizer, template, [chat], batch={"sequence_length": 2000}), tokenizer)
        for template in (source, marked)
    ]
    if name in {"qwen3_5_think", "qwen3_8"}:  # whose generation prompts begin the thoughts
        learned[1] = [text.removeprefix("<think>\n") for text in learned[1]]
    assert learned[0] == [text.rstrip("\n") for text in learned[1]]
    assert len(learned[0]) == 1


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("qwen2_5", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'),
        ("gptoss", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'),
        ("gemma4", "<|tool_call>call:add{a:1}<tool_call|><|tool_response>"),
    ],
)
def test_calls_of_tools_are_learned_without_their_results(tokenizer: Path, name: str, call: str) -> None:
    """Also with templates that refuse a result without its call, or write it into the turn of the assistant."""
    source = published(name)
    add_special_tokens(tokenizer, source)
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    chat: list[dict[str, Any]] = [
        CHAT[1],
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "name": "add", "content": "RESULT"},
        CHAT[-1],
    ]
    data = chat_data(tokenizer, source, [chat], batch={"sequence_length": 2000})
    learned = learned_texts(data, tokenizer)
    assert learned[0] == call
    assert len(learned) == 2
    assert "yes" in learned[1]
    assert not any("RESULT" in text for text in learned)


def test_answers_begin_where_the_assistant_would_begin_to_write(tokenizer: Path) -> None:
    """With thoughts that the template adds, and to the end of the turn, which may have two special tokens."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>"
        "{{ m.reasoning }}</think>{% endif %}{{ m.content }}<|im_end|></s>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = [*CHAT[:4], {"role": "assistant", "content": "yes", "reasoning": "so"}]
    learned = ["4, é<|im_end|>", "<think>so</think>yes<|im_end|></s>"]
    assert learned_texts(chat_data(tokenizer, template, [chat], batch={"sequence_length": 200}), tokenizer) == learned


def test_results_of_tools_in_the_turn_of_the_assistant_are_not_learned(tokenizer: Path) -> None:
    """Nor is a template refused that has no result without its call."""
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% if not messages[loop.index0 - 1].calls %}"
        "{{ raise_exception('no call') }}{% endif %}<result>{{ m.content }}{% else %}<|im_start|>{{ m.role }}\n"
        "{{ m.calls or m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = [CHAT[1], {"role": "assistant", "calls": "add()"}, {"role": "tool", "content": "RESULT"}, CHAT[-1]]
    assert learned_texts(chat_data(tokenizer, template, [chat]), tokenizer) == ["add()<|im_end|>", "yes<|im_end|>"]


def test_messages_of_sharegpt_and_calls_of_tools_are_read(tokenizer: Path) -> None:
    """Fields that only messages of other rows have are no fields of a message."""
    calls = (
        "{% for m in messages %}{% if m.tools is defined %}<call>{{ m.tools }}{% endif %}{{ m.role }}: "
        "{{ m.content }}</s>{% endfor %}"
    )
    data = chat_data(
        tokenizer,
        calls,
        [
            [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}],
            [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "", "tools": "look()"}],
        ],
    )
    assert learned_texts(data, tokenizer) == ["ho</s>"]
    assert learned_texts(data, tokenizer, 1) == ["<call>look()assistant: </s>"]


def test_arguments_of_tools_are_those_of_their_row(tokenizer: Path) -> None:
    """Though a column may have the arguments of all rows. A template may ask for calls with a null content."""
    template = (
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls | tojson }}</s>{% else %}"
        "{{ m.role + m.content }}{% endif %}{% endfor %}"
    )
    chats: list[list[dict[str, Any]]] = [
        [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": arguments}]}]
        for arguments in ({"a": 1}, {"b": {"c": 2}})
    ]
    chat_data(tokenizer, template, chats)
    path = tokenizer.parent / "rows.parquet"
    datasets.Dataset.from_dict({"messages": chats}).to_parquet(path)
    spec = rows_spec(tokenizer.parent, [], messages_field="messages", tokenizer=str(tokenizer))
    assert spec.data is not None
    data = built(spec.model_copy(update={"data": spec.data.model_copy(update={"paths": (str(path),)})}))
    texts = [learned_texts(data, tokenizer, index)[0] for index in range(2)]
    assert texts == [f'[{{"name": "f", "arguments": {text}}}]</s>' for text in ('{"a": 1}', '{"b": {"c": 2}}')]


def test_tools_are_for_the_template(tokenizer: Path) -> None:
    """A list of schemas, or one as JSON text; without them, none."""
    template = "{% if tools %}[{{ tools[0].name }}]{% endif %}" + PLAIN
    for tools in ([{"name": "add"}], json.dumps([{"name": "add"}])):
        rows: list[dict[str, Any]] = [{"messages": CHAT, "tools": tools}, {"messages": CHAT, "tools": None}]
        (tokenizer.parent / "chat_template.jinja").write_text(template)
        fields: dict[str, Any] = {"messages_field": "messages", "tools_field": "tools", "tokenizer": str(tokenizer)}
        data = built(rows_spec(tokenizer.parent, rows, **fields))
        texts = [
            Tokenizer.from_file(str(tokenizer)).decode(data.samples[index]["input_ids"].tolist()) for index in (0, 1)
        ]
        assert texts[0] == "[add]" + texts[1]
        assert learned_texts(data, tokenizer) == learned_texts(data, tokenizer, 1)
    rows = [{"messages": CHAT, "tools": "add()"}]
    assert problem(rows_spec(tokenizer.parent, rows, **fields))[0] == "data.messages_field"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_an_answer_of_no_weight_is_not_learned(tokenizer: Path, template: str) -> None:
    """As OpenAI's data has it; a content may be in parts."""
    chat: list[dict[str, Any]] = [
        *CHAT[:2],
        {**CHAT[2], "weight": 0},
        {"role": "user", "content": [{"type": "text", "text": "su"}, {"type": "text", "text": "re?"}]},
        {**CHAT[4], "weight": 1},
    ]
    data = chat_data(tokenizer, template, [chat, CHAT])
    assert learned_texts(data, tokenizer) == ["yes<|im_end|>"]
    assert data.samples[0]["input_ids"].tolist() == data.samples[1]["input_ids"].tolist()
    picture: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, CHAT[4]]
    with pytest.raises(SpecError, match="is not supported: only text parts are"):
        chat_data(tokenizer, template, [picture])


def test_the_day_changes_no_sample() -> None:
    """Templates that write today's date get a fixed one, in their own format."""
    template = ChatTemplate("\n{% if strftime_now is defined %}{{ strftime_now('%d %b %Y, %Y-%m-%d') }}{% endif %}", {})
    assert template.render(Chat([])) == "\n26 Jul 2024, 2024-07-26"


def test_a_template_runs_in_a_sandbox() -> None:
    """It reaches nothing of Python, and cannot change the messages."""
    for source in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"):
        with pytest.raises(ValueError, match="refuses it"):
            ChatTemplate(source, {}).render(Chat([*CHAT]))


def test_a_conversation_is_cut_and_may_have_nothing_to_learn(tokenizer: Path) -> None:
    """Of which the result says how many."""
    long = [{"role": "user", "content": "x" * 200}, CHAT[-1]]
    data = chat_data(tokenizer, PLAIN, [CHAT, long, CHAT[:2], [*CHAT[:3], long[0], CHAT[-1]]])
    assert data.notes == (
        "2 of 4 rows are left out: they have nothing to learn in their first 120 tokens (batch.sequence_length)",
    )
    assert learned_texts(data, tokenizer, 1) == ["4, é<|im_end|>"]
    assert len(data.samples[1]["input_ids"]) == LENGTH
    whole = chat_data(tokenizer, PLAIN, [CHAT[:2]], train_on_prompts=True)
    assert learned_texts(whole, tokenizer) == [
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
    ]


@pytest.mark.parametrize(
    ("rows", "fields", "field", "words"),
    [
        ([{"messages": CHAT}], {}, "data.chat_template", "is required"),
        ([{"messages": CHAT}], {"chat_template": "nowhere.jinja"}, "data.chat_template", "is not a file"),
        ([{"messages": "hi"}], {"chat_template": "plain"}, "data.messages_field", "holds no lists, as of messages"),
        ([{"messages": ["hi"]}], {"chat_template": "plain"}, "data.messages_field", "'hi' is not a message"),
        ([{"messages": [{"text": "hi"}]}], {"chat_template": "plain"}, "data.messages_field", "no `role`; it has text"),
        (
            [{"messages": [{"from": "human", "value": "hi"}, {"from": "function_call", "value": "f()"}]}],
            {"chat_template": "plain"},
            "data.messages_field",
            "from 'function_call', which is not one of human, gpt",
        ),
        (
            [{"messages": CHAT}, {"messages": CHAT[2:]}],
            {"chat_template": "strict"},
            "data.messages_field",
            "a system first .*'4, ",
        ),
        (
            [{"chat": CHAT}],
            {"chat_template": "plain"},
            "data.messages_field",
            "not a field of these rows, which have chat",
        ),
        ([{"messages": CHAT[:2]}], {"chat_template": "plain"}, "data.paths", "no row has anything to learn"),
    ],
)
def test_rows_without_conversations_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], fields: dict[str, Any], field: str, words: str
) -> None:
    """The field at fault is named, and the row."""
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('a system first') }}{% endif %}"
    for name, template in {"plain": PLAIN, "strict": strict + PLAIN}.items():
        (tmp_path / name).write_text(template)
    paths: dict[str, Any] = {name: str(tmp_path / value) for name, value in fields.items()}
    found, message = problem(rows_spec(tmp_path, rows, messages_field="messages", **paths))
    assert found == field
    assert re.search(words, message), message


# --- prompts with completions ---


def test_the_loss_is_that_of_the_completions(tmp_path: Path) -> None:
    """As transformers computes it with the labels of prompts ignored."""
    rows = [{"prompt": "2 + 2 = ", "completion": "4"}, {"prompt": "say ", "completion": "a longer one"}]
    spec = rows_spec(tmp_path, rows, completion_field="completion")
    workload = build_workload(spec)
    batch = built(spec).batch([0, 1])
    assert (batch["labels"] != IGNORED_LABEL).sum(1).tolist() == [1, 12]
    model = build_model(spec, workload)
    total, weight = workload.loss_terms(model, batch)["next_token"]
    assert weight == 13
    losses = []
    for row in rows:
        ids = torch.tensor([*(row["prompt"] + row["completion"]).encode()])
        labels = torch.where(torch.arange(len(ids)) < len(row["prompt"]), IGNORED_LABEL, ids)
        losses.append(model(input_ids=ids[None], labels=labels[None]).loss)
    torch.testing.assert_close(total, losses[0] + 12 * losses[1])


def test_a_reference_model_learns_completions(tmp_path: Path) -> None:
    """Which has no configuration of transformers."""
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "ab", "answer": "cd"}])
    data = {"kind": "records", "paths": [str(path)], "prompt_field": "question", "completion_field": "answer"}
    labels = built(gpt_spec(data=data)).batch([0])["labels"]
    assert labels.tolist() == [[IGNORED_LABEL] * 2 + [*b"cd"]]


def test_messages_may_be_a_prompt_and_its_completion(tokenizer: Path) -> None:
    """Answers within the prompt are not learned."""
    (tokenizer.parent / "chat_template.jinja").write_text(PLAIN)
    rows = [{"prompt": CHAT[:4], "completion": CHAT[4:]}]
    spec = rows_spec(tokenizer.parent, rows, completion_field="completion", tokenizer=str(tokenizer))
    assert learned_texts(built(spec), tokenizer) == ["yes<|im_end|>"]


@pytest.mark.parametrize("packing", ["bfd", "wrapped"])
def test_completions_are_packed(tmp_path: Path, packing: str) -> None:
    """With the labels that they have without packing."""
    rows = [{"prompt": "p" * (number % 5 + 1), "completion": "c" * (number % 7 + 1)} for number in range(30)]
    alone = built(rows_spec(tmp_path, rows, completion_field="completion"))
    packed = built(
        rows_spec(tmp_path, rows, completion_field="completion", batch={"packing": packing, "sequence_length": 16})
    )
    both = [data.batch(range(len(data))) for data in (alone, packed)]
    learned = [sorted(batch["labels"][batch["labels"] != IGNORED_LABEL].tolist()) for batch in both]
    if packing == "bfd":
        assert learned[0] == learned[1] == [ord("c")] * sum(len(row["completion"]) for row in rows)
    else:  # the first token of a part has nothing before it
        assert 0.8 * len(learned[0]) < len(learned[1]) <= len(learned[0])
    assert set(both[1]["input_ids"].flatten().tolist()) == {0, *b"pc"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"completion_field": "a", "messages_field": "b"}, "not both"),
        ({"train_on_prompts": True}, "needs `completion_field` or `messages_field`"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    """When the spec is read."""
    with pytest.raises(SpecError, match=words):
        rows_spec(tmp_path, [], **fields)


def test_only_causal_models_learn_completions(tmp_path: Path) -> None:
    """Others have targets of their own."""
    spec = rows_spec(tmp_path, [{"prompt": "a", "completion": "b"}], completion_field="completion")
    model = {"kind": "transformers", "task": "sequence-classification", "config": {**LLAMA, "pad_token_id": 0}}
    other = WorkloadSpec.model_validate({**spec.model_dump(exclude={"model"}), "model": model})
    field, words = problem(other)
    assert field == "data.completion_field"
    assert "is for causal-lm, and this is sequence-classification" in words
