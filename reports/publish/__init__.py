"""Results where others look for them.

- `hub`: evaluation result files of the Hugging Face hub
- `curves`: curves in experiment trackers, with context length as the step axis
- `command`: what the options of `sbeval report` publish
"""
