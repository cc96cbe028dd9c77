"""Models on disk: Hugging Face checkpoints, training checkpoints, and the quantized artifact.

artifact  Artifact: open, verify and read a quantized model
hf        load_hf, HFCheckpoint: read a Hugging Face directory
hf_save   save_hf: write one
source    ParamSource: parameters one layer at a time, wherever they are
writer    ArtifactWriter: write one, layer by layer, resumable
manifest  what ``manifest.json`` says, and how it is checked
orbax     load_orbax: parameters from a training run
inputs    parameters and tokenizer files, checked before any work
tree      names and shapes of all parameters
"""
