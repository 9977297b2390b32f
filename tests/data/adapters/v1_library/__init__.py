"""A taskset of verifiers v1: a tool that changes the rollout's state, hooks, a stop condition, rewards and a metric."""

import verifiers.v1 as vf


class Shelf(vf.State):
    seen: list[str] = []
    ready: bool = False


class Shelves(vf.Toolset[vf.ToolsetConfig, Shelf]):
    TOOL_PREFIX = "shelf"

    @vf.tool
    async def look(self, word: str) -> str:
        """Look a word up."""
        self.state.seen.append(word)
        return f"{word} is on shelf {len(word)}"


class BookConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class BookData(vf.TaskData):
    answer: str


class Book(vf.Task[BookData, Shelf, BookConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Shelves(config.tools)]

    async def setup(self, trace, runtime):
        trace.state.ready = True

    async def finalize(self, trace, runtime):
        trace.info["looked"] = list(trace.state.seen)

    @vf.stop
    async def looked_too_often(self, trace: vf.Trace) -> bool:
        return len(trace.state.seen) >= 3

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.state.ready and self.data.answer in trace.last_reply)

    @vf.metric
    async def looked(self, trace: vf.Trace) -> float:
        return float(len(trace.info["looked"]))


class LibraryConfig(vf.TasksetConfig):
    words: list[str] = ["ada", "byron", "curie", "darwin"]


class Library(vf.Taskset[Book, LibraryConfig]):
    def load(self):
        for word in self.config.words:
            data = BookData(prompt=f"Where is {word}?", system_prompt="A library.", answer=str(len(word)))
            yield Book(data)


__all__ = ["Library"]
