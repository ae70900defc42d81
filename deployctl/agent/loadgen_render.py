"""Turns prompts into the text that the model is to read, by the server's own chat template.

Runs on the host as a program of the server's interpreter (`python FILE SOURCE TARGET TOKENIZER`), for only that has the
model's tokenizer. Self-contained: this file is all there is. SOURCE holds `{"messages": [...]}` lines, TARGET gets one
JSON text a line, written at once at the end; what is worth knowing is printed as one line `deployctl-render {json}`.
"""

import importlib
import json
import os
import sys

_MARK = "deployctl-render "


def plain(messages):
    """The conversation as text where the model has no template for one."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join("%s: %s" % (message["role"], message["content"]) for message in messages) + "\n\nassistant:"


def simplified(messages):
    """The same conversation for a template that knows only user and assistant turns, alternating, user first."""
    turns: list = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += "\n\n" + message["content"]
        else:
            turns.append({"role": role, "content": message["content"]})
    if turns[0]["role"] == "assistant":
        turns.insert(0, {"role": "user", "content": "Continue."})
    return turns


def load_tokenizer(path):
    """The model's tokenizer, as the load generator loads it."""
    if path.endswith((".json", ".model")):
        return importlib.import_module("sglang.srt.utils.hf_transformers_utils").get_tokenizer(path)
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(path, trust_remote_code=True)


def render(conversations, tokenizer):
    """(texts, note): every conversation whole, ending where the assistant is to answer.

    Args:
        conversations: [[{"role", "content"}]].
        tokenizer: With or without a chat template.

    Returns:
        The texts, and what was done otherwise than the template would have it ("" for nothing).
    """
    if not getattr(tokenizer, "chat_template", None):
        return [plain(messages) for messages in conversations], "the model has no chat template: prompts are plain text"
    bos = getattr(tokenizer, "bos_token", None) or ""
    # The server's tokenizer puts its own in front; one more would be another text than a chat sends.
    doubled = bool(bos) and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    texts, changed, refused = [], 0, 0

    def one(messages):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    for messages in conversations:
        try:
            text = one(messages)
        except Exception:
            try:
                text, changed = one(simplified(messages)), changed + 1
            except Exception:
                text, refused = plain(messages), refused + 1
        if doubled and text.startswith(bos):
            text = text[len(bos) :]
        texts.append(text)
    notes = []
    if changed:
        notes.append("%d prompts hold turns that the chat template refuses: sent as user turns" % changed)
    if refused:
        notes.append("%d prompts are refused by the chat template: sent as plain text" % refused)
    return texts, "; ".join(notes)


def main(source, target, path):
    """Render a file of prompts."""
    with open(source, encoding="utf-8") as lines:
        conversations = [json.loads(line)["messages"] for line in lines]
    try:
        tokenizer = load_tokenizer(path)
    except Exception as error:
        # The load generator will say what is wrong with it, should it need one.
        reason = ("%s: %s" % (type(error).__name__, error)).splitlines()[0][:200]
        texts = [plain(messages) for messages in conversations]
        note = "no tokenizer of the model could be loaded (%s): prompts are plain text" % reason
    else:
        texts, note = render(conversations, tokenizer)
    temporary = target + ".new"
    with open(temporary, "w", encoding="ascii") as out:
        out.writelines(json.dumps(text) + "\n" for text in texts)
    os.replace(temporary, target)
    print(_MARK + json.dumps({"note": note}))


if __name__ == "__main__":
    main(*sys.argv[1:4])
