"""Tokens: conversations as token ids, chat templates, turns and their spans, and the conversion of spans to Samples."""
