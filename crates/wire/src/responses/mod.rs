//! OpenAI's Responses API, translated to chat completions and back, as Codex and the OpenAI clients use it.
//!
//! A request becomes a chat request ([`to_chat`]); the chunks of the answer become the events of a response
//! ([`ResponseStream`]), which is also what a client without a stream gets put together. Shapes are those of the public
//! reference.
//!
//! | of a request | becomes |
//! | --- | --- |
//! | `instructions`, leading messages of `system` and `developer` | one system message, joined by blank lines: many templates take only one, at the front |
//! | `input` text, messages of `input_text`, `output_text`, `refusal` | messages; later ones of `developer` are `system` |
//! | `function_call`, `function_call_output` | `tool_calls` of the assistant's message before them, messages of role `tool` |
//! | `custom_tool_call`, `custom_tool_call_output` | the same; a tool of free text is a function of one argument, `input` |
//! | `reasoning` | `reasoning` and `reasoning_content` of the message after it; what is encrypted is left out |
//! | images, files, `item_reference`, calls of tools that OpenAI's servers run | refused by their path |
//! | a `namespace` of tools, as Codex sends it; calls of them | functions named `namespace__name`: chat has one name for a tool. Calls come back under both. The description of the namespace is left out |
//! | `tools` of `function` and `custom` | function tools. `web_search` is left out where nothing forces it, because Codex offers it by default; the answer's `tools` show it is not there. All others are refused |
//! | `tool_choice`, `parallel_tool_calls`, `temperature`, `top_p`, `max_output_tokens`, `stream` | the same under chat's names |
//! | `reasoning.effort`, `text.format`, `text.verbosity` | `reasoning_effort`, `response_format`, `verbosity` |
//! | `previous_response_id`, `conversation`, `background`, `prompt` | refused: nothing is stored here, the whole history is to be sent. `store` is taken and answered `false` |
//! | `include` | `reasoning.encrypted_content` is taken and means nothing; all else is refused |
//! | `metadata`, `client_metadata`, `truncation` `disabled`, `service_tier`, ... | nothing; `metadata` is repeated in the answer |
//! | all else | passed on as it is: engines have fields of their own |
//!
//! Answers: reasoning comes back as an item of `reasoning_text`, and `input_tokens_details.cached_tokens` is what the
//! engine found in its cache. A stream ends with `response.completed`, `response.incomplete` or `response.failed`, and
//! every event has its `sequence_number`.

mod input;
mod item;
mod request;
mod stream;
mod tools;

pub use request::{Echo, to_chat};
pub use stream::ResponseStream;
