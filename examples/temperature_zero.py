"""Does text at temperature 0 change when speculation is on? In transformers, here, and in servers without and with it:

python examples/temperature_zero.py [http://127.0.0.1:8080 http://127.0.0.1:8081]
"""

import json
import sys
import urllib.request

import longdraft

target, tokenizer = longdraft.load(weights="float32")
prompt = "One, two, three, four, five, six, seven, eight. Once more: one, two, three,"
asked = {**tokenizer(prompt, return_tensors="pt"), "max_new_tokens": 48, "do_sample": False}
plain = target.generate(**asked).tolist()
ours = {"custom_generate": longdraft.Speculator("longspec", target=target, plan="fixed")}
for how in ({"prompt_lookup_num_tokens": 8}, {"assistant_early_exit": 8}, ours):
    print(*how, "the same tokens:", target.generate(**asked, **how).tolist() == plain)
body = json.dumps({"prompt": prompt, "max_tokens": 48, "temperature": 0}).encode()
texts = []
for url in sys.argv[1:]:
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    texts.append(json.load(urllib.request.urlopen(request))["choices"][0]["text"])
    print(url, "the same text:", texts[-1] == texts[0])
