"""Ask a server for the text of a base model and of its adapters, side by side: symbiosis serve demo, then this."""

import os

import openai

PROMPT = "def average(numbers):"

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
client = openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
for model in client.models.list():
    print(f"--- {model.id}\n{PROMPT}", end="")
    stream = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=64, temperature=0, stream=True)
    for event in stream:
        print(event.choices[0].text, end="", flush=True)
    print()
