"""Three turns of openai-agents through the Responses API, run by its own Python: prints the final
answers as JSON. The tool is called in the first and the third turn."""

import asyncio
import json
import sys

import agents
import openai


@agents.function_tool
def look_up(subject: str) -> str:
    """Looks something up in the harbour's notes."""
    return request["notes"][subject]


async def main():
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=request["url"], api_key="none", max_retries=0)
    agent = agents.Agent(
        name="Harbour",
        instructions="You answer questions about a harbour. " * 100,
        model=agents.OpenAIResponsesModel("scripted", client),
        tools=[look_up],
    )
    history = []
    answers = []
    for question in request["questions"]:
        history.append({"role": "user", "content": question})
        if len(answers) % 2:
            result = agents.Runner.run_streamed(agent, history)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, history)
        answers.append(result.final_output)
        history = result.to_input_list()
    print(json.dumps(answers))


request = json.loads(sys.argv[1])
asyncio.run(main())
