"""Three turns of openai-agents through the Responses API, run by its own Python: prints the final
answers as JSON. The tool is called in the first and the third turn. With `session` the history is a
conversation of the server, from which the last item is taken and given back."""

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
    session = agents.OpenAIConversationsSession(openai_client=client)
    kept = {"session": session} if request["session"] else {}
    history = []
    answers = []
    for question in request["questions"]:
        history.append({"role": "user", "content": question})
        sent = question if kept else history
        if len(answers) % 2:
            result = agents.Runner.run_streamed(agent, sent, **kept)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, sent, **kept)
        answers.append(result.final_output)
        history = result.to_input_list()
        if kept:
            items = await session.get_items()
            last = await session.pop_item()
            assert last == items[-1] and await session.get_items() == items[:-1]
            await session.add_items([last])
            assert len(await session.get_items()) == len(items)
    if kept:
        assert len(await session.get_items(limit=3)) == 3
        await session.add_items([{"role": "user", "content": "More."}] * 45)
        assert len(await session.get_items()) == len(items) + 45
        await session.clear_session()
    print(json.dumps(answers))


request = json.loads(sys.argv[1])
asyncio.run(main())
