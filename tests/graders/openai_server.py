"""A server of the OpenAI format whose models are scripts that read what they are sent. A process of its own.

    python tests/graders/openai_server.py      prints its port

`careful` reads only the data between the marks, and looks for "42". The others have one weakness each.
"""

import json
import re
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CALLS: Counter[str] = Counter()


def parts_of(messages: list[dict[str, str]]) -> dict[str, str]:
    """The data, by name, as a reader that respects the marks sees it."""
    mark = re.search(r"begin with ([0-9a-f]+)\.", messages[0]["content"])
    assert mark is not None, "the judge is told the mark"
    found = re.findall(rf"{mark[1]} begin (.+)\n((?s:.*?))\n{mark[1]} end \1", messages[-1]["content"])
    return dict(found)


def careful(messages: list[dict[str, str]]) -> str:
    parts = parts_of(messages)
    if "answer" in parts:
        return json.dumps({"reason": "it says", "score": 10 if "42" in parts["answer"] else 0})
    good = ["42" in parts["first answer"], "42" in parts["second answer"]]
    return json.dumps({"better": {(True, False): "first", (False, True): "second"}.get((good[0], good[1]), "tie")})


def gullible(messages: list[dict[str, str]]) -> str:
    """Obeys any order to give a grade."""
    order = re.search(r"reply with (\{.*?\})|(\{\"better\": \"\w+\"\})", messages[-1]["content"])
    return next(group for group in order.groups() if group) if order else careful(messages)


def quotes(messages: list[dict[str, str]]) -> str:
    """Repeats what it judges before its own grade."""
    return f"{parts_of(messages)['answer']}\n{careful(messages)}"


def compares(messages: list[dict[str, str]]) -> str:
    """Grades by how many words of the right answer are in the answer."""
    parts = {name: set(re.findall(r"\w+", text.lower())) for name, text in parts_of(messages).items()}
    known = parts["right answer"]
    return json.dumps({"reason": "words", "score": round(10 * len(known & parts["answer"]) / len(known))})


MODELS = {
    "compares": compares,
    "careful": careful, "gullible": gullible, "quotes": quotes,
    "prefers-first": lambda messages: '{"better": "first"}',
    "too-high": lambda messages: '{"score": 11}',
    "flag": lambda messages: '{"score": true}',
    "twice": lambda messages: '{"score": 0, "score": 10}',
    "fenced": lambda messages: f"```json\n{careful(messages)}\n```",
    "flaky": careful, "cut": careful,
}  # fmt: skip


def completion(text: str, ended_by: str = "stop") -> str:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": ended_by}
    return json.dumps({"id": "1", "object": "chat.completion", "choices": [choice]})


class Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        model = asked["model"]
        CALLS[model] += 1
        key = self.headers.get("authorization", "")
        if self.path != "/v1/chat/completions":
            self.say(404, "")
        elif model == "denied":
            self.say(401, f"wrong key {key}")
        elif model == "down" or (model == "flaky" and CALLS["flaky"] % 3):
            self.say(503 if model == "down" else 429, "later", {"retry-after": "7"} if model == "flaky" else {})
        elif model == "moved":
            self.say(302, "", {"location": f"http://127.0.0.1:{self.server.server_address[1]}/v1/elsewhere"})
        elif model == "huge":
            self.say(200, completion(careful(asked["messages"])) + " " * 3_000_000)
        elif model == "nonsense":
            self.say(200, "<html>")
        elif model == "wants-key" and key != "Bearer sesame":
            self.say(401, "")
        else:
            text = MODELS.get(model, careful)(asked["messages"])
            self.say(200, completion(text, "length" if model == "cut" else "stop"))

    def say(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(text.encode())), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    print(server.server_address[1], flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), server.shutdown()), daemon=True).start()
    server.serve_forever()
