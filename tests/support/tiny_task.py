"""The configuration of a multiple-choice task of lm-eval's own kind, on a local file named `data`."""

TINY_TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [a, b]
doc_to_target: 0
"""
