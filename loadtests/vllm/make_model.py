"""Make the tiny model's folder: random weights, a BPE tokenizer and a chat template; nothing is downloaded.

Runs inside .venv-vllm as a script: `python make_model.py FOLDER`. All units serve these weights, so all give
the same greedy answer to a prompt, which neither ends by itself nor soon repeats: lost or doubled text shows.
"""

import sys
import sysconfig
from pathlib import Path

import torch  # type: ignore[import-not-found]
from tokenizers import (  # type: ignore[import-not-found]
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

VOCAB_SIZE = 4096
MAX_TOKENS = 8192
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def random_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two layers, three million parameters: a step takes one CPU core milliseconds.

    The usual initializer_range of 0.02 gives one word over and over; 0.1 lets attention steer the output. In
    float32 two tokens are hardly ever so close that the batch a prompt is computed in decides between them.
    A token that cannot be spoken gets the logit 0, far below the best of the others.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    mute = [token for token in range(VOCAB_SIZE) if not speakable(tokenizer, token)]
    model.lm_head.weight.data[mute] = 0
    return model


def speakable(tokenizer: PreTrainedTokenizerFast, token: int) -> bool:
    """Say whether the token is a space and a word, and is read back as itself.

    Text made of such tokens alone is read back as those tokens. So a generation that goes on from its text so
    far, on another unit, says what it would have said; a trained model too mostly spells like its tokenizer.
    """
    text: str = tokenizer.decode([token])
    spaced_word = text.startswith(" ") and text[1:2].strip() != ""
    return spaced_word and bool(tokenizer.encode(text) == [token])


def trained_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, learnt from Python's own library: any text comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    tokenizer.train(sorted(str(path) for path in library.glob("*.py")), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
    )


def main() -> None:
    """Write the model and the tokenizer into the folder named on the command line."""
    folder = Path(sys.argv[1])
    tokenizer = trained_tokenizer()
    tokenizer.save_pretrained(folder)
    random_model(tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    main()
