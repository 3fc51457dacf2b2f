"""A user's fine-tuning with TRL: a LoRA adapter on a small Llama, texts packed to the full length."""

from __future__ import annotations

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
WORDS = [f"word{number}" for number in range(500)]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)


def texts() -> Dataset:
    """Texts of 20 to 79 words."""
    return Dataset.from_list([{"text": " ".join(WORDS[number % 7 :: 7][: 20 + number % 52])} for number in range(3000)])


def build_trainer(arguments: SFTConfig) -> SFTTrainer:
    """A trainer of the adapter."""
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return SFTTrainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=texts(),
        processing_class=words,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )


def main() -> None:
    """Fine-tune; every setting is an argument of `SFTConfig`."""
    (arguments,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
    build_trainer(arguments).train()


if __name__ == "__main__":
    main()
