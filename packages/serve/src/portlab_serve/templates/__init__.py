"""Chat templates, one for each tool-call format; `portlab_serve.chat_template` reads them."""
