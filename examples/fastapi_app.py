"""A FastAPI app of one's own that streams answers; `longdraft serve` has OpenAI's API, slots and a queue beside that.

Run with: uvicorn --app-dir examples fastapi_app:app    (needs the extras demo and serve)
Ask with: curl -N "http://127.0.0.1:8000/answer?question=Why+is+the+sky+blue"
"""

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

import longdraft

model, tokenizer = longdraft.load()
spec = longdraft.Speculator(target=model, tokenizer=tokenizer)
spec.planner()  # measures this machine now, not while the first caller waits
app = FastAPI()


@app.get("/answer")
def answer(question: str, max_new_tokens: int = 128) -> StreamingResponse:
    # Callers take turns, step by step. One that goes away asks for no more steps.
    steps = spec.stream(question, max_new_tokens=max_new_tokens)
    return StreamingResponse((step.text for step in steps), media_type="text/plain; charset=utf-8")


@app.exception_handler(longdraft.LongdraftError)
def refused(_: Request, error: longdraft.LongdraftError) -> PlainTextResponse:
    return PlainTextResponse(str(error), 400)
