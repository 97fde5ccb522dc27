"""Halo from Python: check a run, train on rows in memory, look at the result."""

import halo_core

words = ("one", "two", "three", "four")
rows = [
    {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]}
    for word in words
]
config = {"family": "lfm2", "model_name_or_path": "tiny", "max_steps": 5, "output_dir": "runs/python-%H%M%S"}

# The plan of a run, or `halo_core.errors.Refused` with everything that stands in its way.
plan = halo_core.check({**config, "dataset_name": "examples/quickstart/train.jsonl"}).plan
print(plan.architecture, plan.features)

result = halo_core.train(config, rows=rows, on_step=lambda step: print(step.step, step.loss))
print(result.output_dir, result.account.train.supervised_tokens)

# The cells of the support matrix, as `halo matrix --json` prints them.
print(halo_core.matrix()[0])
