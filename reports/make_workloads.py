"""Make the prompts of `reports/measure_acceptance.py`: four JSON-lines files of token ids.

    python reports/make_workloads.py --gsm8k gsm8k_test.jsonl --aime aime24.jsonl -o runs/workloads

    gsm8k.jsonl      few-shot prompts of solved problems that end with a question (``question``, ``answer`` a line)
    code.jsonl       modules of Python's standard library
    documents.jsonl  chapters of the Python language reference
    reasoning.jsonl  competition problems (``problem`` a line) in the chat template; what they are continued with is
                     made when they are measured

Source code and documents are those of the Python that runs this.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in (".", "kernels", "calibration", "simulator")]

from aspire.errors import InputError  # noqa: E402
from aspire.fileio import write_text_atomic  # noqa: E402
from aspire.models import find_model  # noqa: E402
from aspire.prompts import load_prompts  # noqa: E402
from aspire.tokenizer import Tokenizer, load_tokenizer  # noqa: E402

REQUEST = "Think step by step and write down every step of your reasoning in full.\n\n"


def few_shot(path: Path, tokenizer: Tokenizer, num_prompts: int, input_len: int, seed: int) -> list[list[int]]:
    """Solved problems in random order, cut at the front to ``input_len`` tokens, then a question without its answer."""
    problems = read_lines(path, ("question", "answer"))
    chooser = random.Random(seed)
    prompts = []
    for _ in range(num_prompts):
        asked, *solved = chooser.sample(problems, len(problems))
        end = tokenizer.encode(f"Question: {asked['question']}\nAnswer:", add_special_tokens=False)
        body: list[int] = []
        for shot in solved:
            text = f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n"
            body = tokenizer.encode(text, add_special_tokens=False) + body
            if len(body) + len(end) >= input_len:
                break
        prompts.append((body + end)[-input_len:])
    return prompts


def reasoning(path: Path, tokenizer: Tokenizer, num_prompts: int) -> list[list[int]]:
    """Each problem in the chat template, in turn."""
    texts = itertools.cycle([REQUEST + line["problem"] for line in read_lines(path, ("problem",))])
    return [
        list(tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=True))
        for text in itertools.islice(texts, num_prompts)
    ]


def read_lines(path: Path, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; raises `InputError` when it cannot be read or a key is missing."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; give a file of JSON lines") from error
    if not lines or any(key not in line for line in lines for key in keys):
        raise InputError(f"{path} has lines without {' and '.join(keys)}; give another file")
    return lines


def long_text(name: str, tokenizer: Tokenizer, num_prompts: int, input_len: int, seed: int) -> list[list[int]]:
    """Prompts of the data set ``name`` of `aspire.prompts`."""
    found = load_prompts(name, tokenizer=tokenizer, num_prompts=num_prompts, input_len=input_len, seed=seed)
    return [list(prompt.token_ids or ()) for prompt in found]


def main() -> None:
    """Write the four files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--aime", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--gsm8k-tokens", type=int, default=4096)
    parser.add_argument("--long-tokens", type=int, default=7168)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output-dir", type=Path, required=True)
    given = parser.parse_args()
    source = find_model(given.model).tokenizer_source
    if source is None:
        raise InputError(f"model '{given.model}' has no tokenizer; choose another --model")
    tokenizer, count = load_tokenizer(source), given.num_prompts
    workloads = {
        "gsm8k": few_shot(given.gsm8k, tokenizer, count, given.gsm8k_tokens, given.seed),
        "code": long_text("source-code", tokenizer, count, given.long_tokens, given.seed),
        "documents": long_text("docs", tokenizer, count, given.long_tokens, given.seed),
        "reasoning": reasoning(given.aime, tokenizer, count),
    }
    for name, prompts in workloads.items():
        lines = [json.dumps({"id": f"{name}-{index}", "prompt_token_ids": ids}) for index, ids in enumerate(prompts)]
        path = write_text_atomic(given.output_dir / f"{name}.jsonl", "\n".join(lines) + "\n")
        lengths = sorted(map(len, prompts))
        print(f"{path}: {len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens")


if __name__ == "__main__":
    main()
