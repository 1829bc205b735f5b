//! A model's words without its weights: tokenizer and chat template. All that the router needs of a model.

use crate::chat_value::ChatSource;
use crate::template::{CHATML, ChatInput, ChatTemplate, TemplateError};
use crate::tiny::tiny_config;
use crate::tokenizer::Tokenizer;

/// Tokenizer and chat template of a model. Cloning shares both.
#[derive(Clone)]
pub struct Vocabulary {
    /// What `/v1/models` calls the model.
    pub name: String,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Conversations to prompts; `None` if the model came without a template.
    pub template: Option<ChatTemplate>,
    /// The longest sequence, in tokens.
    pub context_tokens: usize,
}

impl Vocabulary {
    /// The words of [`Model::tiny`](crate::Model::tiny): bytes and ChatML.
    #[must_use]
    pub fn tiny() -> Self {
        let config = tiny_config();
        Self {
            name: config.name,
            tokenizer: Tokenizer::bytes(),
            template: Some(ChatTemplate::new(CHATML, "", "<|im_end|>").expect("the built-in template is valid")),
            context_tokens: config.context_tokens,
        }
    }

    /// The prompt of a conversation, as text.
    ///
    /// # Errors
    /// If the model has no template, the messages are malformed, or the template refuses or fails on them.
    pub fn render<V: ChatSource>(&self, input: &ChatInput<'_, V>) -> Result<String, TemplateError> {
        self.template.as_ref().ok_or(TemplateError::Missing)?.render(input)
    }

    /// The prompt of a conversation, as tokens.
    ///
    /// # Errors
    /// Those of [`render`](Self::render).
    pub fn encode_chat<V: ChatSource>(&self, input: &ChatInput<'_, V>) -> Result<Vec<u32>, TemplateError> {
        Ok(self.tokenizer.encode(&self.render(input)?))
    }
}
