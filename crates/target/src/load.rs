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
            let config = Self::from_toml(&text)
                .map_err(|source| LoadError::Toml { path: path.to_owned(), source })?;
            let keys = config.tls.hosts.values();
            if config.dhchap.has_secrets() || keys.into_iter().any(SecretSource::is_inline) {
                check_private(path, &file)
                    .map_err(|(what, advice)| LoadError::Open { what, advice })?;
            }
            Ok(config)
        }
    }
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
    /// The file is not nvmetcli's JSON, or asks for a feature that a Rio target lacks.
    #[error("{}: {problem}", .path.display())]
    Json {
        /// Path of the file.
        path: PathBuf,
        /// The error and its place.
        problem: JsonError,
    },
}
