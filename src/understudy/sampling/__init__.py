"""How the target's words are drawn, and how a draft is checked against them: the promise lives here."""
