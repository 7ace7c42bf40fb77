"""MQTT 5: persistent sessions and shared subscriptions, acknowledged by hand."""

from settled.transports.mqtt.session import MqttTopic
from settled.transports.mqtt.transport import MqttTransport
from settled.transports.mqtt.wire import PublishFailed

__all__ = ["MqttTopic", "MqttTransport", "PublishFailed"]
