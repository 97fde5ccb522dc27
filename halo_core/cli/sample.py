"""`halo sample`: a few tokens from a Hugging Face folder, through transformers alone, for people."""

from __future__ import annotations

from pathlib import Path

from halo_core.errors import Problem, Refused


def run(folder: Path, prompt: str, max_new_tokens: int) -> None:
    """Print the greedy answer to one prompt.

    Raises:
        Refused: the folder is no Hugging Face folder.
    """
    if not (folder / "config.json").is_file():
        raise Refused(
            Problem(
                key="DIR",
                value=folder,
                why="it holds no config.json",
                remedy="give a run's output_dir or a model folder",
            )
        )
    print(answer(folder, prompt, max_new_tokens))


def answer(folder: Path, prompt: str, max_new_tokens: int = 64) -> str:
    """Return the model's greedy answer to one user turn (or its continuation, where there is no chat template)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    if tokenizer.chat_template:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    else:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(
            ids.to(device),
            attention_mask=torch.ones_like(ids).to(device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
