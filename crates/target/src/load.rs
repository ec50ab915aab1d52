//! Reading a configuration from a file, in one of its two formats.

use std::io::Read;
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use crate::config::Config;
use crate::nvmetcli::{self, JsonError};
use crate::secrets::{SecretSource, check_private};

impl Config {
    /// Reads a configuration file: TOML, or nvmetcli's JSON if the name ends in `.json` or the
    /// file begins with `{`.
    ///
    /// # Errors
    /// [`LoadError`]: the file can't be read, or its content is invalid. The error names the place.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let unread = |source| LoadError::Read { path: path.to_owned(), source };
        let mut file = std::fs::File::open(path).map_err(unread)?;
        // It may have secrets.
        let mut text = Zeroizing::new(String::new());
        file.read_to_string(&mut text).map_err(unread)?;
        let is_named_json = path.extension().is_some_and(|extension| extension == "json");
        if is_named_json || text.trim_start().starts_with('{') {
            nvmetcli::parse(&text)
                .map_err(|problem| LoadError::Json { path: path.to_owned(), problem })
        } else {
            let config =
                Self::from_toml(&text).map_err(|source| toml_error(path, &text, source))?;
            let keys = config.tls.hosts.values();
            if config.dhchap.has_secrets() || keys.into_iter().any(SecretSource::is_inline) {
                check_private(path, &file)
                    .map_err(|(what, advice)| LoadError::Open { what, advice })?;
            }
            Ok(config)
        }
    }
}

/// An error in a TOML file. The usual text shows the line, which may have a secret.
fn toml_error(path: &Path, text: &str, source: Box<toml::de::Error>) -> LoadError {
    let path = path.to_owned();
    if !SecretSource::is_in(text) {
        return LoadError::Toml { path, source };
    }
    let before = source.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let shown = |message: &str| !SecretSource::is_in(message);
    let message = Some(source.message()).filter(|message| shown(message));
    let what = message.unwrap_or("not valid there").to_owned();
    LoadError::Hidden { path, line, what }
}

/// The reason why a configuration file was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file can't be read.
    #[error("{}: can't read the configuration: {source}", .path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file has secrets, and others than its owner may read it.
    #[error("{what}; {advice}")]
    Open {
        /// The defect.
        what: String,
        /// The remedy.
        advice: &'static str,
    },
    /// The file is not TOML with the right keys.
    #[error("{}: {source}", .path.display())]
    Toml {
        /// Path of the file.
        path: PathBuf,
        /// The error and its place.
        source: Box<toml::de::Error>,
    },
    /// The file is not TOML with the right keys. It has secrets, so no line of it is shown.
    #[error("{}: line {line}: {what} (the file has secrets, so the line is not shown)", .path.display())]
    Hidden {
        /// Path of the file.
        path: PathBuf,
        /// The number of the line, from 1.
        line: usize,
        /// The defect.
        what: String,
    },
    /// The file is not nvmetcli's JSON, or asks for a feature that a Rio target lacks.
    #[error("{}: {problem}", .path.display())]
    Json {
        /// Path of the file.
        path: PathBuf,
        /// The error and its place.
        problem: JsonError,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_in_a_file_with_secrets_shows_no_line_of_it() {
        let secret = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
        let path = std::env::temp_dir().join(format!("rio-secrets-{}.toml", std::process::id()));
        let fails = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Config::load(&path).unwrap_err().to_string()
        };
        // A quote is missing, a value has another type, and a fault in another line.
        for (text, line) in [
            (format!("reactors = 1\n[tls.hosts]\n\"nqn.a\" = \"{secret}\n"), 3),
            (format!("reactors = \"{secret}\"\n"), 1),
            (format!("[tls.hosts]\n\"nqn.a\" = \"{secret}\"\n[nothing]\n"), 3),
        ] {
            let shown = fails(&text);
            assert!(!shown.contains("VRL"), "{shown}");
            assert!(shown.contains(&format!("line {line}:")), "{shown}");
        }
        assert!(fails("reactors = \"two\"\n").contains("two"), "without a secret it is shown");
        std::fs::remove_file(&path).unwrap();
    }
}
