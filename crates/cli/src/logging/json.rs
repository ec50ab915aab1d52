//! The program's own lines in a JSON log, with the keys of the logger's: `timestamp`, `level`,
//! `message` and `target`.

use serde_json::{Map, Value};
use tracing_subscriber::fmt::{
    format::Writer,
    time::{FormatTime, SystemTime},
};

/// A line: an object with the time, the level, the message, and these further keys.
pub(super) fn line(level: &str, message: &str, more: &[(&str, Value)]) -> String {
    let mut timestamp = String::new();
    // Writing into a string can't fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    let keys = [("timestamp", timestamp.as_str()), ("level", level), ("message", message)];
    let own = keys.into_iter().chain([("target", "rio")]);
    let mut object: Map<String, Value> =
        own.map(|(key, text)| (key.to_owned(), text.into())).collect();
    object.extend(more.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
    let mut line = Value::Object(object).to_string();
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_an_object_whatever_the_message_is() {
        let text = line("WARN", "a \"quoted\"\nmessage", &[("left_out", 3.into())]);
        assert_eq!(text.matches('\n').count(), 1, "{text}");
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&value["message"], &value["left_out"]),
            (&"a \"quoted\"\nmessage".into(), &3.into())
        );
        assert_eq!((&value["level"], &value["target"]), (&"WARN".into(), &"rio".into()));
        let timestamp = value["timestamp"].as_str().unwrap();
        assert!(timestamp.starts_with("20") && timestamp.ends_with('Z'), "{timestamp}");
    }
}
