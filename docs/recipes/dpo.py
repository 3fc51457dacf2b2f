"""Train a small language model on preference pairs with TRL; every setting is an argument."""

import ast
import copy
import sysconfig
from pathlib import Path

from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, TrlParser


def functions(text):
    """The first line and the rest of each function in a source."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first, _, rest = ast.get_source_segment(text, node).partition("\n")
            yield first + "\n", rest


def main():
    (training,) = TrlParser(DPOConfig).parse_args_and_config()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:8]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    heads, bodies = zip(*(it for text in texts for it in functions(text)), strict=True)
    pairs = {"prompt": heads, "chosen": bodies, "rejected": bodies[1:] + bodies[:1]}  # another function's body

    words = ByteLevelBPETokenizer()
    words.train_from_iterator(texts, vocab_size=2048, special_tokens=["<pad>", "<eos>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(  # your model: AutoModelForCausalLM.from_pretrained(...)
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config)
    trainer = DPOTrainer(
        model,
        ref_model=copy.deepcopy(model),  # TRL makes it itself where the model was loaded by its name
        args=training,
        train_dataset=Dataset.from_dict({name: list(column) for name, column in pairs.items()}),
        processing_class=tokenizer,
    )
    trainer.train()


if __name__ == "__main__":
    main()
