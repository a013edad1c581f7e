"""A notebook executed by the job, papermill and nbclient style: scheduled notebooks, huggingface/accelerate notebook_launcher."""

import nbclient
import nbformat

with open("train.ipynb") as stream:
    notebook = nbformat.read(stream, as_version=4)
nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
print(notebook.cells[-1].outputs[0]["text"].strip())
