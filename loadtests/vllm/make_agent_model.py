"""Make the agents' model: it thinks, calls tools and answers, by heart; nothing is downloaded.

Runs inside .venv-vllm as a script: `python make_agent_model.py FOLDER`; one or two minutes on two cores. A
small Llama learns the dialogues of agent_script.py until it says each of them greedily, token for token.
"""

import string
import sys
import sysconfig
from pathlib import Path

import torch  # type: ignore[import-not-found]
from agent_script import COUNT, KINDS, answers, request  # type: ignore[import-not-found]
from tokenizers import (  # type: ignore[import-not-found]
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import (  # type: ignore[import-not-found]
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 2048
MAX_TOKENS = 4096
# As Qwen's: line ends are no part of the word behind them, so an open message is spelt as it was generated.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MAX_STEPS = 300
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
NO_THOUGHT = "<think>\\n\\n</think>\\n\\n"
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\n</tools>\nFor each call, return:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n\' }}'
    "{% endif %}"
    "{% set silent = '" + NO_THOUGHT + "' if not enable_thinking else '' %}"
    "{% for message in messages %}"
    "{% set role = 'user' if message['role'] == 'tool' else message['role'] %}"
    "{{ '<|im_start|>' + role + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ silent }}{% endif %}"
    "{{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + silent }}{% endif %}"
)


def trained_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of ASCII, with the markers as tokens of their own that are shown."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=["Ġ", "Ċ", *(set(string.printable) - set(string.whitespace))],
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text("utf-8", "replace") for path in sorted(library.glob("*.py"))[:80]]
    tokenizer.train_from_iterator([text.encode("ascii", "ignore").decode() for text in texts], trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
    )


def lessons(tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], int]]:
    """Each dialogue as tokens, and where its answer begins."""
    found = []
    for kind in KINDS:
        for number in range(COUNT):
            asked = request(kind, number)
            prompt: str = tokenizer.apply_chat_template(
                asked["messages"],
                tools=asked.get("tools"),
                add_generation_prompt=True,
                tokenize=False,
                **asked.get("chat_template_kwargs", {}),
            )
            before = tokenizer.encode(prompt)
            found.append((before + tokenizer.encode(answers(kind, number) + TURN_END), len(before)))
    return found


def untrained(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two layers: enough to tell twenty dialogues apart."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def teach(model: LlamaForCausalLM, pairs: list[tuple[list[int], int]], pad: int) -> int:
    """Train until each token of each answer is by far the likeliest; the steps it took."""
    width = max(len(tokens) for tokens, _ in pairs)
    tokens = torch.tensor([each + [pad] * (width - len(each)) for each, _ in pairs])
    labels = torch.full_like(tokens, -100)
    for row, (each, begin) in enumerate(pairs):
        labels[row, begin : len(each)] = tokens[row, begin : len(each)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=MAX_STEPS)
    model.train()
    order = torch.Generator().manual_seed(0)
    good = 0
    for step in range(MAX_STEPS):
        rows = torch.randperm(len(pairs), generator=order)[:8]
        longest = int((labels[rows] != -100).nonzero()[:, 1].max()) + 1
        loss = model(input_ids=tokens[rows, :longest], labels=labels[rows, :longest]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        good = good + 1 if loss.item() < 0.004 else 0
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if good == 12:
            return step
    return MAX_STEPS


def is_learnt(model: LlamaForCausalLM, pairs: list[tuple[list[int], int]]) -> bool:
    """Whether it says each answer greedily."""
    model.eval()
    with torch.no_grad():
        for tokens, begin in pairs:
            said = model(input_ids=torch.tensor([tokens])).logits[0, begin - 1 : -1].argmax(-1)
            if said.tolist() != tokens[begin:]:
                return False
    return True


def main() -> None:
    """Write the model and the tokenizer into the folder named on the command line."""
    folder = Path(sys.argv[1])
    tokenizer = trained_tokenizer()
    tokenizer.save_pretrained(folder)
    model, pairs = untrained(tokenizer), lessons(tokenizer)
    print(f"{len(pairs)} dialogues of up to {max(len(tokens) for tokens, _ in pairs)} tokens", flush=True)
    print(f"{teach(model, pairs, tokenizer.pad_token_id)} steps", flush=True)
    if not is_learnt(model, pairs):
        sys.exit("the model did not learn its dialogues")
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
