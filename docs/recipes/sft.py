"""Fine-tune a small language model with TRL; every setting is an argument."""

import sysconfig
from pathlib import Path

from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config


def main():
    training, model = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20]  # your texts
    texts = [path.read_text(encoding="utf-8") for path in sources]

    words = ByteLevelBPETokenizer()
    words.train_from_iterator(texts, vocab_size=2048, special_tokens=["<pad>", "<eos>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(  # your model: AutoModelForCausalLM.from_pretrained(...)
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        args=training,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
    )
    trainer.train()


if __name__ == "__main__":
    main()
