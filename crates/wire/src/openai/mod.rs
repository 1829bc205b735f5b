//! The OpenAI dialect as vLLM speaks it: requests, answers, errors, and edits of bodies that are passed through.
//!
//! A router must not rewrite what it does not understand: [`Body`] keeps every member of a request word for word and
//! changes only the members that it is told to. The worker builds its answers from the types in `response`; the router
//! reads whatever an engine answers through the lenient [`AnswerView`].

mod body;
pub(crate) mod chat_form;
mod conversation;
mod edit;
mod error;
mod models;
pub(crate) mod node;
mod parts;
mod request;
mod response;
mod view;

pub use body::Body;
pub use edit::{AnswerEdit, edit_answer};
pub use error::{ApiError, ErrorKind};
pub use models::{ModelCard, ModelList, TokenizeInput, TokenizeRequest, TokenizeResponse};
pub use node::Node;
pub use parts::{AnswerParts, CallPart};
pub use request::{
    ChatMessage, ChatRequest, CompletionRequest, Content, ContentPart, GenerationParams, MAX_STOP_STRINGS, PromptInput,
};
pub use response::{
    AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatResponse, CompletionChoice,
    CompletionResponse, PromptTokensDetails, Usage,
};
pub use view::AnswerView;
