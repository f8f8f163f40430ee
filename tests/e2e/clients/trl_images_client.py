"""Run TRL's own `VLLMClient` with images against a server and print what it got, as JSON: `trl_images_client.py URL
FOLDER_OF_TRL CASES`, where CASES are the arguments of calls, with files in place of pictures.

Up to TRL 1.10 ids and images go in one call; since 1.16 images are rendered first, and their features go with ids.
"""

import json
import sys
import warnings

URL, FOLDER, CASES = sys.argv[1:]
if FOLDER:
    sys.path.insert(0, FOLDER)
warnings.simplefilter("ignore")

import trl  # noqa: E402
from PIL import Image  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402


def opened(files):
    return None if files is None else [Image.open(file) for file in files]


def generate(prompts, images, **options):
    images = [opened(files) for files in images]
    if not hasattr(client, "image_features"):
        return client.generate(prompts, images=images, **options)
    features = client.image_features(images)
    placed = [None if one is None else place(one, ids) for one, ids in zip(features, prompts, strict=True)]
    return client.generate(prompts, features=placed, **options)


def place(features, ids):
    """As TRL's `VLLMGeneration` does it: each run of the image's id is an image."""
    pad, runs = cases["pad"], []
    for position, token_id in enumerate(ids):
        if token_id == pad and position and ids[position - 1] == pad:
            runs[-1]["length"] += 1
        elif token_id == pad:
            runs.append({"offset": position, "length": 1})
    assert len(runs) == len(features["mm_placeholders"]["image"])
    return {**features, "mm_placeholders": {"image": runs}}


def chat(text, file):
    parts = [{"type": "text", "text": text}, {"type": "image_pil", "image_pil": Image.open(file)}]
    return client.chat([[{"role": "user", "content": parts}]], max_tokens=4)


def refused(**call):
    try:
        generate(**call)
    except Exception as error:
        return str(error)
    return "not refused"


cases = json.loads(CASES)
client = VLLMClient(base_url=URL, connection_timeout=30)
found = {
    "version": trl.__version__,
    "generated": [generate(**call) for call in cases["generate"]],
    "chat": chat(*cases["chat"]),
    "refused": [refused(**call) for call in cases["refused"]],
}
print(json.dumps(found))
